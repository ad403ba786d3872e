# speedswap's commands. Each is safe to run twice, and fast the second time.
#
#   make demo        install into .venv and train word2vec on real text; vectors and plot go to demo-output/
#   make check       while you work: lint, types, and the quick tests of the core; a minute and a half on two cores
#   make test        what a change has to pass: lint, types, and the tests of all that users see; twelve minutes on two cores
#   make test-all    what a release has to pass: also every case of every sweep, kills and cuts at every point, torture,
#                    notebooks, benchmarks, and the tools; 35 minutes on two cores
#   make gpu-check   on a machine with a GPU: build, measure and test, in two calls of ten minutes in all;
#                    needs no network and makes no .venv; without make: python3 tools/gpu_check.py --part first --out …
#   make torture     attack what speedswap promises, for MINUTES=10; prints the seed, the findings and their counts
#   make bench       measure everything on this machine's CPU, for hours, as JSON into bench-output/;
#                    `make bench figures RESULTS=benchmarks/results` renews all that the pages show
#   make docs        the documentation as a site, links checked, without compiling anything; open build/site/index.html
#   make figures     rewrite the tables of README.md and benchmarks/README.md, and the pictures, from benchmarks/results/
#   make lint | format | clean
#
# PYTHON=python3.12        the Python that makes .venv (3.10 or newer), or that gpu-check uses
# TORCH_INDEX=https://…    the package index that torch comes from, e.g. the one for a certain CUDA version
# PARTS=tables             of gpu-check, this call alone (first, second, tests, tables or applications), or these parts by name; OUT=…
#                          LIMIT=…: its folder and the seconds of a call; COMMIT=…: where the files are no repository
# MINUTES=90 SEED=7        of torture; ONLY=kills,forks: these attacks alone
# PROCESSES=2              of the tests, with about 2 GiB of memory each; `make test` has one more, on the simulated GPU
# SPEEDSWAP_WERROR=OFF     take no compiler's warning for an error, where the tests are installed
# SPEEDSWAP_CUDA=ON|OFF    compile the CUDA kernels for all GPUs, or not at build (AUTO: for those of this machine, if nvcc is found)

PYTHON ?= python3
TORCH := torch==2.13.0
TORCH_INDEX ?=
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
OUT ?= benchmarks/results
PARTS ?=
PROCESSES ?= 3
MINUTES ?= 10
SEED ?=
ONLY ?=
LIMIT ?=
COMMIT ?=
RESULTS ?= bench-output

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles what it imports, which is a fraction of the 18,000 files that pip would compile.
INSTALL := $(PIP) install --no-compile
TORCH_STAMP := $(VENV)/.stamp-$(subst ==,-,$(TORCH))
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
CPP_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')

# torch's idle threads spin by default, which a machine that does anything else as well pays for dearly.
demo check test test-package test-simulated test-all torture docs: export OMP_WAIT_POLICY ?= passive

# Many processes import the same files, which Python would compile again for each.
demo check test test-package test-simulated test-all torture docs bytecode: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test test-package test-simulated test-all torture lint libraries bytecode lint-and-libraries format \
    bench figures docs gpu-check clean FORCE
.DELETE_ON_ERROR:

# Small corpus, many passes: these settings give it neighbours that make sense.
DEMO := --epochs 60 --window 10 --sample 1e-4 --batch 1024 --nearest palestinian,afghanistan,fire,cricket,economy,bin

demo: $(VENV)/.stamp-demo
	$(BIN)/speedswap word2vec $(DEMO) --output demo-output
	@echo "The vectors, the loss plot and the figures are in $(CURDIR)/demo-output"

# A test that takes too long fails by its name; a process that ends in the middle of one ends the run.
PYTEST_OPTIONS := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --timeout 280 \
    -o faulthandler_exit_on_timeout=true

# From the public step down to the bytes: what most changes touch, and what breaks first.
CORE := $(addprefix tests/,test_public_names.py test_structure.py optim batching/test_splitter.py batching/test_check.py \
    $(addprefix kernels/test_,compact.py cpu_loops.py cuda_on_host.py distinct.py features.py fill.py ids.py records.py \
        rows.py segment_sum.py transfers.py) \
    $(addprefix tables/test_,table.py stores.py pending.py init.py reset_rows.py) \
    $(addprefix swapping/test_,attach.py calls_of_a_step.py embedding_bag.py failed_steps.py lookahead.py lookup.py \
        refused_arguments.py signatures.py training.py weight.py) swapping/collections/test_equal_training.py)

check: lint-and-libraries
	$(BIN)/python -m pytest -m 'not release and not sweep and not slow' $(PYTEST_OPTIONS) $(CORE)

# Tests also sleep and wait for other processes: three of them, and one on the simulated GPU, keep two cores busy.
test: lint-and-libraries
	@$(MAKE) --no-print-directory --jobs $(if $(filter 0,$(PROCESSES)),1,2) test-package test-simulated

test-package: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m 'not release' $(PYTEST_OPTIONS)

test-simulated: $(VENV)/.stamp-dev
	@$(BIN)/python tools/simulated_tests.py core -q -m 'not release' $(PYTEST_OPTIONS) -n 0 > $(VENV)/simulated.log 2>&1; \
	    status=$$?; cat $(VENV)/simulated.log; exit $$status

test-all: lint-and-libraries
	$(BIN)/python -m pytest --nbmake $(PYTEST_OPTIONS)
	$(BIN)/python tools/simulated_tests.py all -q $(PYTEST_OPTIONS)

torture: $(VENV)/.stamp-dev
	PYTHONPATH=tools $(BIN)/python -m torture --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/english.py
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# What tests load besides the package: the kernels compiled for the host, and the simulated GPU.
libraries: $(VENV)/.stamp-dev
	PYTHONPATH=tests $(BIN)/python tests/kernels/host_build.py

# What all processes of the tests import, compiled once, before each of them would do it.
bytecode: $(VENV)/.stamp-bytecode

$(VENV)/.stamp-bytecode: $(VENV)/.stamp-dev-packages | $(VENV)/.stamp-dev
	@$(BIN)/python -m pytest --collect-only --quiet > $@.txt || { cat $@.txt; exit 1; }
	@touch $@

lint-and-libraries:
	@$(MAKE) --no-print-directory --jobs 2 bytecode lint libraries

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_FILES)

bench: $(VENV)/.stamp-demo
	@mkdir -p $(RESULTS)
	$(BIN)/speedswap bench transfer --device cpu --json $(RESULTS)/transfer-cpu.json
	@set -e; for bench in benchmarks/bench_*.py; do \
	    name=$$(basename $$bench .py); \
	    echo "== $$name"; \
	    $(BIN)/python $$bench --device cpu --json $(RESULTS)/$${name#bench_}-cpu.json; \
	done

figures: $(VENV)/.stamp-demo
	$(BIN)/python tools/readme_figures.py

# Notebooks keep the outputs that they have: `make test-all` executes them.
docs: $(VENV)/.stamp-docs-packages
	PYTHONPATH=. $(BIN)/sphinx-build -W --keep-going -c docs -d build/site.doctrees . build/site
	$(BIN)/python tools/site_links.py build/site

gpu-check:
	$(PYTHON) tools/gpu_check.py --out $(OUT) $(if $(LIMIT),--seconds $(LIMIT)) --part '$(PARTS)' --commit '$(COMMIT)'

clean:
	rm -rf $(VENV) build dist bench-output demo-output .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv, in steps: each is done once, and again when what it was made from has changed.

$(VENV)/.stamp-made:
	@$(PYTHON) -c 'import sys; sys.exit("speedswap needs Python 3.10 or newer, e.g.: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) --quiet 'pip>=23.1'
	@touch $@

# torch alone and first: on Linux its ordinary wheels bring gigabytes of CUDA libraries, which a machine without an
# NVIDIA driver has no use for. There the CPU wheels are offered too, and pip prefers them (2.13.0+cpu sorts above
# 2.13.0); where pip is configured with wheels of its own (find-links), those decide.
CPU_WHEELS = $(if $(filter-out Linux,$(shell uname))$(shell command -v nvidia-smi)$(findstring find-links,$(shell $(PIP) config list)),,--extra-index-url $(TORCH_CPU_INDEX))

$(TORCH_STAMP): $(VENV)/.stamp-made
	$(INSTALL) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),$(CPU_WHEELS))
	@touch $@

# The install is editable: Python files are read from here, and only a change to the build's inputs, or to which Python
# files there are, runs it again. It compiles while torch and the other packages are unpacked, where make runs two jobs.

$(VENV)/.python-files: FORCE | $(VENV)/.stamp-made
	@find speedswap -name '*.py' | sort > $@.now
	@cmp -s $@.now $@ && rm $@.now || mv $@.now $@

$(VENV)/.stamp-build: $(BUILD_INPUTS) $(VENV)/.python-files | $(VENV)/.stamp-made
	$(INSTALL) --quiet --no-deps --editable .
	@touch $@

# Where torch was built for CUDA, the CuPy that fits comes along. torch's version is repeated so that nothing moves it.
CUDA_EXTRA = $(shell $(BIN)/python -W ignore -c 'import torch; v = torch.version.cuda; print("cuda" + v.split(".")[0] if v else "")')

$(VENV)/.stamp-demo-packages: $(TORCH_STAMP) pyproject.toml tools/packages.py
	$(BIN)/python tools/packages.py $(CUDA_EXTRA) demo > $@.txt
	$(INSTALL) --quiet $(TORCH) --requirement $@.txt
	@touch $@

$(VENV)/.stamp-dev-packages: $(TORCH_STAMP) pyproject.toml tools/packages.py
	$(BIN)/python tools/packages.py $(CUDA_EXTRA) demo dev docs > $@.txt
	$(INSTALL) --quiet $(TORCH) --requirement $@.txt
	@touch $(VENV)/.stamp-demo-packages $@

$(VENV)/.stamp-docs-packages: $(TORCH_STAMP) pyproject.toml tools/packages.py
	$(BIN)/python tools/packages.py docs > $@.txt
	$(INSTALL) --quiet $(TORCH) --requirement $@.txt
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-build $(VENV)/.stamp-demo-packages
	@touch $@

$(VENV)/.stamp-dev: export SPEEDSWAP_WERROR ?= ON
$(VENV)/.stamp-dev: $(VENV)/.stamp-build $(VENV)/.stamp-dev-packages
	@touch $(VENV)/.stamp-demo $@
