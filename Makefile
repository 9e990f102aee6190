# make run [ARGS="precision=bf16 optimizer.lr=0.05"] · make test · make test-integrations · make test-all · make faults · make bench
# Each sets up .venv by itself first: all it needs is Python 3.11+ and the package registry.

PYTHON ?= python3
BIN := .venv/bin
export PYTHONUNBUFFERED = 1
# The tests start dozens of interpreters: compiling every module, and rewriting every assertion, once is enough.
unexport PYTHONDONTWRITEBYTECODE

run: .venv/ready
	@$(BIN)/python -m runner $(ARGS)

test: .venv/ready
	@echo "lint, types, tests"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@# pyright keeps one core busy for half a minute: it runs beside the tests, and says at their end what it found.
	@$(BIN)/pyright > .venv/types 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
		$(BIN)/python -m pytest --numprocesses=4 --dist=loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
		wait $$types; types=$$?; cat .venv/types; [ $$tests = 0 ] || exit $$tests; exit $$types

test-all: .venv/ready
	@echo "the tests on every supported Python, with the lowest, the pinned and the next versions, and as on older CPUs: three hours or so"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'nox>=2025.10'
	@$(BIN)/nox --session tests instruction_sets $(ARGS)

test-integrations: .venv/integrations/ready
	@echo "the tests of Ray, MLflow, W&B, Trackio, ONNX, timm, Box2D, Atari and MinAtar, with these packages installed"
	@RUNNER_INTEGRATIONS=1 .venv/integrations/bin/python -m pytest $(or $(ARGS),tests/integrations \
		tests/tracking/test_trackers.py tests/sweeps/engines/test_ray.py tests/commands/test_convert.py)

faults: .venv/ready
	@echo "faults: all of them, an hour or so on two cores; make test tries a selection"
	@RUNNER_FAULTS=all $(BIN)/python -m pytest --numprocesses=4 --dist=worksteal $(or $(ARGS),tests/faults)

bench: .venv/bench
	@for name in overhead "overhead --channels-last" text language resnet parallel ddp_overhead pipeline "pipeline --precision bf16" \
		dqn sweep plan tune; do $(BIN)/python -m benchmarks.$$name || exit 1; done

.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv: the versions in constraints.txt (about 5 GB with torch; a minute or two)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v < (3, 14); sys.exit(0 if ok else f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}: try make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# Without --quiet: pip shows what it downloads and installs, with a bar in a terminal.
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

.venv/bench: .venv/ready
	@echo "adding the peers that the benchmarks compare with"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	@touch $@

# It sees the packages of .venv, so that torch and CUDA, 5 GB, are not installed twice, and has older ones of its own.
.venv/integrations/ready: .venv/ready
	@echo "adding the packages of the integrations (1 GB)"
	@$(BIN)/python -m venv --clear .venv/integrations
	@for python in $(BIN) .venv/integrations/bin; do \
		$$python/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done | \
		{ read -r shared && read -r own && echo "$$shared" > "$$own/shared.pth"; }
	@.venv/integrations/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary onnxruntime transformers datasets \
		$$(grep -E '^(torch|torchvision|numpy)==' constraints.txt) \
		-e '.[test,ray,mlflow,wandb,trackio,export,timm,box2d,render,atari,minatar,images]'
	@touch $@

clean:
	rm -rf .venv .nox build *.egg-info .pytest_cache .ruff_cache

.PHONY: run test test-all test-integrations faults bench clean
