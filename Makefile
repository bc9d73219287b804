# make demo | test | test-fast | lint | bench | setup | clean
#
#   PYTHON=python3.12   the interpreter to build on: 3.10, 3.11 or 3.12
#   TORCH_INDEX=<url>   an additional package index to take torch and torchvision from. PyTorch's index of CPU
#                       wheels (its address is on PyTorch's "Get started" page, choose "CPU") saves about 6 GB of
#                       CUDA libraries: its "2.8.0+cpu" satisfies the pin "2.8.0" and ranks above it.
#   CACHE=<folder>      where the third-party packages are kept
PYTHON ?= python3
TORCH_INDEX ?=
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/nc

# The requirements take 7 GB, so they live in one venv under CACHE, named by a hash of what determines its content
# and shared by all clones. The clone's own .venv sees those packages through a .pth file and adds only this
# clone's code, so each clone runs its own.
REQUIREMENTS := requirements/ipex.txt requirements/ipex-nodeps.txt
RUN := .venv/bin/python

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: demo test test-fast lint bench setup clean

# Models and data ship inside packages: nothing may reach for a network while it runs.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
# Tokenizers warn at every fork when they run threads of their own.
export TOKENIZERS_PARALLELISM := false

demo: setup
	$(RUN) examples/quickstart.py

test: setup
	$(RUN) -m pytest -q

test-fast: setup
	$(RUN) -m pytest -q -m "not slow"

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: setup
	$(RUN) benchmarks/run.py

# Leaves the shared packages alone: other clones use them.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Prints what identifies the interpreter, or one line that says what to do instead.
define PROBE
import platform, sys
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    sys.exit("nc: IPEX exists for Linux on x86-64 only.")
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit("nc: needs Python 3.10, 3.11 or 3.12, but %s is %d.%d. Install one and run, e.g., make PYTHON=python3.12"
             % ((sys.executable,) + tuple(sys.version_info[:2])))
print(sys.version_info[:2], sys.base_prefix)
endef
export PROBE

# Each stamp is written last, so an interrupted step is done again from the start. The lock serves all clones.
setup:
	@python=$$($(PYTHON) -c "$$PROBE")
	cache=$$(realpath -m "$(CACHE)")
	hash() { sha256sum | cut -c1-16; }
	shared=$$cache/env-$$({ echo "$$python $(TORCH_INDEX)"; cat $(REQUIREMENTS); } | hash)
	stamp=$$({ echo "$(CURDIR) $$shared"; cat setup.py pyproject.toml nc/_version.py; } | hash)
	ready() { [[ -e $$shared/.complete && -e .venv/.complete && $$(< .venv/.complete) == "$$stamp" ]]; }
	if ready; then exit; fi
	
	mkdir -p "$$cache"
	exec 9> "$$cache/lock"
	flock -n 9 || { echo "nc: waiting for another set-up to finish"; flock 9; }
	if ready; then exit; fi
	
	if [[ ! -e $$shared/.complete ]]; then
	    echo "nc: installing the requirements into $$shared (once; some minutes, up to 7 GB)"
	    rm -rf "$$shared"
	    $(PYTHON) -m venv "$$shared"
	    pip=("$$shared/bin/python" -m pip --disable-pip-version-check install)
	    "$${pip[@]}" $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") -r requirements/ipex.txt
	    "$${pip[@]}" -q --no-deps -r requirements/ipex-nodeps.txt
	    touch "$$shared/.complete"
	fi
	
	echo "nc: installing this clone into .venv"
	rm -rf .venv
	$(PYTHON) -m venv --without-pip .venv
	site='import sysconfig; print(sysconfig.get_path("purelib"))'
	"$$shared/bin/python" -c "$$site" > "$$($(RUN) -c "$$site")/shared.pth"
	$(RUN) -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
	echo "$$stamp" > .venv/.complete
