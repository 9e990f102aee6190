"""Tests of `runner.sweeps.misfits`: a sweep whose options never fit its data is refused before its first job."""

from unittest import mock

import pytest

from runner.config.composition import Composer
from runner.config.errors import ConfigError
from runner.sweeps import misfits
from runner.sweeps.sweep_jobs import SweepJobs

NETWORKS = "model=glob([convnet,tiny,nature_cnn,minatar_cnn{}])"
IMAGE_NETWORKS = NETWORKS.format("")


def checked(*words: str) -> list[str]:
    """Check the jobs of a sweep; return the models whose data was loaded."""
    with mock.patch.object(misfits, "run_in_child", lambda function, *arguments: function(*arguments)):
        with mock.patch.object(misfits, "build_run", wraps=misfits.build_run) as build:
            misfits.check_one_fits(SweepJobs(Composer(), [*words]), words, None)
    return [call.args[0]["model"]["_target_"].rpartition(".")[2] for call in build.call_args_list]


@pytest.mark.parametrize("workload", ["regression", "dqn"])
def test_a_sweep_over_networks_of_which_none_fits_is_refused(workload):
    with pytest.raises(ConfigError, match=r"^model: got 'convnet': .*; none of the 4 combinations fits\n.*model=qnet"):
        checked(f"workload={workload}", IMAGE_NETWORKS, "seed=0,1,2")


def test_the_check_ends_with_the_first_network_that_fits_and_leaves_other_errors_to_the_jobs(tmp_path):
    assert checked(NETWORKS.format(",qnet"), "workload=dqn")[-1] == "QNet"
    assert checked(IMAGE_NETWORKS) == ["ConvNet"]
    assert len(checked(IMAGE_NETWORKS, "data=imagefolder", f"data.root={tmp_path}")) == 1
    for words in (
        ["model=convnet,tiny,nature_cnn,minatar_cnn"],
        [IMAGE_NETWORKS, "data.columns=[a],[b]"],
        ["seed=range(0,9)"],
    ):
        assert checked("workload=regression", *words) == [], words
