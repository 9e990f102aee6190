"""An environment of the user: `env=FILE.py:NAME`, or one that the file registers, `env=FILE.py env.id=Name-v0`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.config import user_code
from runner.config.errors import ABSENT, check
from runner.config.packed_code import pack, unpack
from runner.env.base import Env

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec


@dataclass
class UserEnv(Env):
    """A class or function that makes a gymnasium environment, or, if `id` is set, one that the file registers."""

    id: str = ""

    @property
    def name(self) -> str:
        return self.id or user_code.given().names().get("env", "")

    def _spec(self) -> EnvSpec:
        from gymnasium.envs.registration import EnvSpec

        file = user_code.given().files.get("env")
        check(file is not None, "", ABSENT, "no environment is given", "env=FILE.py:NAME")
        assert file is not None
        if self.id:
            user_code.executed(file.path)
            spec = super()._spec()
        else:
            made = user_code.find("env")
            check(callable(made), "", file.typed, "it is no class or function that makes an environment", "name one")
            spec = EnvSpec(f"{getattr(made, '__name__', 'env')}-v0", entry_point=made)
        # Processes of environments cannot import the file by the name of its module.
        return replace(spec, entry_point=_Maker(spec.entry_point)) if callable(spec.entry_point) else spec


class _Maker:
    """Makes environments with a class or function of the user, also in other processes."""

    def __init__(self, made: Callable[..., Any]):
        self._content, self.metadata = pack(made), {"render_modes": [], **getattr(made, "metadata", {})}

    def __call__(self, **options: Any) -> Any:
        return unpack(self._content)(**options)
