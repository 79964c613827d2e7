# One word per job. Everything runs in .venv, which the first word that needs it sets up.
#
#   make demo    train a small GPT on two hosts made on this machine, and show what came out
#   make test    the tests          make check   lint, types, import directions
#   make test-fast  those that need neither hosts nor processes that train together (a minute)
#   make test-all   the tests, then every combination of what they test (tests marked `exhaustive`)
#   make test-deepspeed TESTS=folder   DeepSpeed's own tests against the drop-in package; the folder is tests/ of a clone of DeepSpeed
#   make bench   measurements       make lab     hosts to play with: make lab HOSTS=4
#   make field   public reports of faults as programs, with dslaunch and DeepSpeed, into docs/reference/faults-of-the-field.md (half an hour)
#   make docs    check the documents and build their site in build/site;   make docs-serve shows it at http://127.0.0.1:8000
#   make bench-zero     a training step at each ZeRO stage beside DDP, fully_shard and DeepSpeed (twenty minutes)
#   make bench-parallel  steps of models divided in each direction beside DeepSpeed and torch, into docs/reference/benchmarks.md (ten minutes)
#   make bench-generation  tokens a second beside transformers and DeepSpeed, into docs/reference/benchmarks.md (five minutes)
#   make bench-launch   time to start on 1 to 64 hosts beside other launchers, into docs/reference/benchmarks.md (ten minutes)
#   make bench-checkpoint  saving and loading beside DeepSpeed, fully_shard and a plain write, into docs/reference/benchmarks.md (ten minutes)
#   make bench-recovery  from a fault to the next step beside torchrun, NVRx and torchft, into docs/reference/benchmarks.md (ten minutes)
#   make soak    200 random faults in a row in one job on hosts made here: what is lost, left and told (an hour; FAULTS=20 for less)
#   make bench-kernels  the optimizer kernels beside a copy of memory, torch and DeepSpeed, into docs/reference/benchmarks.md (ten minutes)
#   make bench-narrow-states  losses with masters and states of fewer bits beside float32, into docs/reference/benchmarks.md (twenty minutes)
#   make bench-offload  memory, files and time of training wherever values lie, into docs/reference/benchmarks.md (ten minutes)
#   make bench-drop-in  the same programs under dslaunch's package deepspeed and DeepSpeed's, into docs/reference/benchmarks.md (ten minutes)
#   make bench-plan     predicted memory beside that of real steps, into docs/reference/plan-accuracy.md (ten minutes)
#   make bench-plan-time  predicted time of a step beside that of real steps, into docs/reference/plan-accuracy.md (ten minutes)
#   make gpu PART=first   on a machine with a GPU: what it answers in less than four minutes; then PART=second, the rest (five minutes)
#   make gpu-bundle      before that, where there is a network: what such a machine lacks, into .gpu/
#   make check-sanitizers   tests/kernels on compiled code that watches every memory access (ten minutes)

PYTHON ?= python3
VENV   ?= .venv
HOSTS  ?= 2
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint .ci/constraints.txt
PYTEST  = $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
# mkdocs-material announces its successor at each build; docs/design/dependencies.md says what follows from it.
MKDOCS  = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
# pytest rewrites the asserts of 300 files: half of the time in which it collects them, where it may not keep what it made.
unexport PYTHONDONTWRITEBYTECODE
KERNELS = $(wildcard kernels/CMakeLists.txt kernels/*.h kernels/*/*.cpp kernels/*/*.h)

.PHONY: demo test test-fast test-exhaustive test-all test-deepspeed check check-sanitizers bench bench-launch bench-zero bench-parallel bench-generation bench-checkpoint bench-recovery soak bench-kernels bench-narrow-states bench-offload bench-drop-in bench-plan bench-plan-time field lab docs docs-serve gpu gpu-bundle setup clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml .ci/constraints.txt .ci/packages $(KERNELS)
	@PYTHON=$(PYTHON) .ci/packages
	@echo "setting up $(VENV) (a few minutes the first time), torch first, then what is needed of:"
	@grep -v '^#' .ci/constraints.txt | tr '\n' ' ' | fold -s -w 120 && echo
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1' # which knows dependency groups
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	DSLAUNCH_REQUIRE_KERNELS=1 $(PIP) --no-build-isolation --editable '.[train,demo,watch,report,prometheus,otel]' --group dev --group docs --group drop-in
	@# To compare with: in a folder of its own, where nothing imports it by accident; no compiler. Of what it depends on
	@# only the small packages that are not here anyway.
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-deps --no-build-isolation --upgrade --target $(VENV)/deepspeed \
		deepspeed einops msgpack py-cpuinfo \
		|| echo "without DeepSpeed: tests/launcher/jobs/test_against_deepspeed.py will be skipped, make bench-launch leaves it out"
	@touch $@

demo: setup
	$(BIN)/python docs/examples/demo.py

test: setup
	@# as pip does for who installs it: the tests start hundreds of processes, and many of them may not write here
	$(BIN)/python -m compileall -q package launcher runtime kernels
	@# most of those processes import torch, and a fifth of that is a search for garbage among what stays loaded
	@echo 'import gc, os; "PYTEST_CURRENT_TEST" in os.environ and gc.set_threshold(50_000, 20, 50)' \
		> $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests_of_dslaunch.pth
	@# the CUDA device of the tests, which no single test may wait for
	$(BIN)/python -m tests.fake_cuda.build
	@# four on two cores: half of the time is waiting, for processes that start, hosts that fall silent and time
	@# limits that run out
	$(PYTEST) -m "not exhaustive"

test-fast: setup
	$(BIN)/python -m tests.fake_cuda.build
	@# as many as there are cores, which none of these leaves idle
	$(PYTEST) -n $$(nproc) -m "not exhaustive and not slow and not lab and not ranks"

test-exhaustive: setup
	$(BIN)/python -m tests.fake_cuda.build
	$(PYTEST) -m exhaustive

test-all: test test-exhaustive

test-deepspeed: setup
	$(BIN)/python -m tests.deepspeed_tests $(or $(TESTS),no-folder) $(ONLY)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports

bench: setup
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file; done

bench-launch: setup
	@# as pip does for who installs it: the editable installation may have no compiled modules
	$(BIN)/python -m compileall -q launcher package
	$(BIN)/python benchmarks/bench_hosts.py --publish

bench-zero: setup
	$(BIN)/python benchmarks/bench_zero.py --publish

bench-parallel: setup
	$(BIN)/python benchmarks/bench_parallel.py --publish

bench-checkpoint: setup
	$(BIN)/python benchmarks/bench_checkpoint.py --publish

bench-recovery: setup
	@# in a folder of their own, as DeepSpeed is; what pip does not have is left out by name
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target $(VENV)/recovery_peers \
		torchft nvidia-resiliency-ext defusedxml nvidia-ml-py pynvml || echo "without torchft and NVRx"
	$(BIN)/python -m compileall -q launcher package runtime kernels
	$(BIN)/python benchmarks/bench_recovery.py --publish

soak: setup
	$(BIN)/python -m compileall -q launcher package runtime kernels
	$(BIN)/python benchmarks/soak.py --faults $(or $(FAULTS),200) --seed $(or $(SEED),1)

bench-kernels: setup
	$(BIN)/python benchmarks/bench_kernels.py --publish

bench-narrow-states: setup
	$(BIN)/python benchmarks/bench_narrow_states.py --publish

bench-offload: setup
	$(BIN)/python benchmarks/bench_offload.py --publish

bench-generation: setup
	$(BIN)/python -m compileall -q package runtime kernels
	$(BIN)/python benchmarks/bench_generation.py --publish

field: setup
	$(BIN)/python -m compileall -q package launcher runtime kernels
	$(BIN)/python -m tests.field

check-sanitizers: setup
	$(BIN)/python tests/kernels/sanitizers.py

bench-drop-in: setup
	$(BIN)/python -m compileall -q package runtime kernels
	$(BIN)/python benchmarks/bench_drop_in.py --publish

bench-plan: setup
	$(BIN)/python -m tests.fake_cuda.build
	$(BIN)/python -m tests.runtime.plan.table --publish

bench-plan-time: setup
	$(BIN)/python -m compileall -q package launcher runtime kernels
	$(BIN)/python benchmarks/bench_plan_time.py --publish

gpu:
	@# as the machine is: it need not have a network to set .venv up
	$(if $(FAKE),$(BIN)/python,$(PYTHON)) -m tests.gpu $(PART) $(if $(FAKE),--fake)

gpu-bundle: setup
	$(BIN)/python -m tests.gpu.bundle $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

lab: setup
	$(BIN)/python -m tests.lab up $(HOSTS)

docs: setup
	$(BIN)/python -m pytest tests/docs
	$(MKDOCS) build

docs-serve: setup
	$(MKDOCS) serve

clean:
	rm -rf $(VENV) build dist demo-out gpu-out .gpu
