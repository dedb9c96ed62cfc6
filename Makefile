# ncclwatch: `make demo` runs the main job on a real NCCL job without a GPU, `make test` runs every test. Both set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Tests start hundreds of commands: each would compile 300 modules anew where Python may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

# Debian's own interpreter: python3-bpfcc (BCC) is built for it.
SYSTEM_PYTHON := /usr/bin/python3
VENV := .venv
PYTHON := $(VENV)/bin/python
CACHE := .cache
NCCL_CACHE := $(CACHE)/nccl
# 2.21.5, 2.27.5 and 2.32.3 run on the testbed; 2.19.3 has no magics in its communicators, which the finder must cope with.
NCCL_VERSIONS := 2.19.3 2.21.5 2.27.5 2.32.3
# The demo needs one.
DEMO_NCCL := 2.27.5

DEMO_PACKAGES := $(shell sed -e 's/\#.*//' scripts/debian-packages.txt)
FLEET_PACKAGES := $(shell sed -e 's/\#.*//' scripts/fleet-packages.txt)
TEST_PACKAGES := $(DEMO_PACKAGES) $(FLEET_PACKAGES) bpftrace strace $(shell sed -e 's/\#.*//' tests/packages.txt tests/vm/packages.txt)

.PHONY: help demo fleet test beside test-all setup setup-demo lint unit attach vm vm-aarch64 gpu shim fuzz bench eval eval-real eval-full calibrate clean

help:
	@echo "make demo [PID=...]  attach to a real NCCL job (without a GPU), freeze a rank, see it named"
	@echo "make fleet [ONCE=1]  everything that watches many jobs, beside a real NCCL job, and a frozen rank on the page (root)"
	@echo "make test            every test: lint, types, unit, attach (root), QEMU guest; GPU where there is one"
	@echo "make test-all        the same with every release of NCCL in each test (hours)"
	@echo "make eval            the scoreboard on simulated scenarios"
	@echo "make eval-real       the scoreboard on a few scenarios played by real NCCL (root)"
	@echo "make eval-full       all scenarios, simulated and real, all releases and transports (hours)"
	@echo "make calibrate       weights and thresholds of the slowness estimate, from jobs whose fault is known"
	@echo "make bench           the benchmarks"
	@echo "make fuzz            hostile input for every way in (TARGETS=..., INPUTS=1000000, SEED=1; hours)"
	@echo "make clean           remove what was built (not the download cache)"

# --- set-up: quick when run again ------------------------------------------------------------------------------------

$(CACHE)/stamps:
	@mkdir -p $@

# Debian packages: a stamp remembers the list that was installed. Servers among them are for tests: Debian would start them as services of
# the machine, which policy-rc.d (its documented way to say no) keeps it from.
define apt_install
	@missing=$$({ dpkg-query -W -f='$${Package} $${db:Status-Status}\n' $(1) 2>/dev/null || true; } | awk '$$2=="installed"{print $$1}' | sort -u \
	  | comm -13 - <(printf '%s\n' $(1) | sort -u)); \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" != 0 ]; then echo "make: these Debian packages are missing, install them as root:" $$missing >&2; exit 1; fi; \
	  echo "==> installing Debian packages:" $$missing; \
	  policy=/usr/sbin/policy-rc.d; \
	  [ -e $$policy ] || { printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; trap "rm -f $$policy" EXIT; }; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing >$(CACHE)/apt.log 2>&1 \
	    || { tail -20 $(CACHE)/apt.log >&2; exit 1; }; \
	fi
endef

$(CACHE)/stamps/demo-packages: scripts/debian-packages.txt Makefile | $(CACHE)/stamps
	$(call apt_install,$(DEMO_PACKAGES))
	@touch $@

$(CACHE)/stamps/fleet-packages: scripts/debian-packages.txt scripts/fleet-packages.txt Makefile | $(CACHE)/stamps
	$(call apt_install,$(DEMO_PACKAGES) $(FLEET_PACKAGES))
	@touch $@

$(CACHE)/stamps/test-packages: scripts/debian-packages.txt scripts/fleet-packages.txt tests/packages.txt tests/vm/packages.txt Makefile | $(CACHE)/stamps
	$(call apt_install,$(TEST_PACKAGES))
	@touch $@

$(CACHE)/stamps/venv: requirements.txt pyproject.toml $(CACHE)/stamps/demo-packages
	@echo "==> Python environment in $(VENV)"
	@[ -x $(PYTHON) ] || $(SYSTEM_PYTHON) -m venv --system-site-packages $(VENV)
	@{ $(PYTHON) -m pip install --disable-pip-version-check --no-deps --ignore-installed -r requirements.txt && \
	   $(PYTHON) -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .; } >$(CACHE)/pip.log 2>&1 \
	  || { tail -20 $(CACHE)/pip.log >&2; exit 1; }
	@touch $@

# Wheels are downloaded once; of each only the library and its headers are kept.
$(NCCL_CACHE)/%/lib/libnccl.so.2: $(CACHE)/stamps/venv
	@echo "==> NCCL $*"
	@$(PYTHON) scripts/fetch_nccl.py $* $(NCCL_CACHE)/$*

setup-demo: $(CACHE)/stamps/venv $(NCCL_CACHE)/$(DEMO_NCCL)/lib/libnccl.so.2
	@echo "==> CPU testbed for NCCL $(DEMO_NCCL)"
	@$(MAKE) -s -C tests/testbed NCCL_CACHE=$(CURDIR)/$(NCCL_CACHE) PYTHON=$(CURDIR)/$(PYTHON) VERSIONS=$(DEMO_NCCL)

setup: $(CACHE)/stamps/test-packages $(CACHE)/stamps/venv
	@$(MAKE) -s -j4 $(NCCL_VERSIONS:%=$(NCCL_CACHE)/%/lib/libnccl.so.2)
	@echo "==> CPU testbed for NCCL $(NCCL_VERSIONS)"
	@$(MAKE) -s -j2 -C tests/testbed NCCL_CACHE=$(CURDIR)/$(NCCL_CACHE) PYTHON=$(CURDIR)/$(PYTHON)
	@$(MAKE) -s shim

# The counter shim of the device plane (docs/device-plane.md): needs a C compiler only.
shim:
	@$(MAKE) -s -C kernel_counters

# What needs a GPU, and what it measures there: results go to build/gpu, for docs/gpu-results.md. PyTorch is not needed.
gpu: setup
	@if [ ! -e /dev/nvidia0 ]; then echo "make: no NVIDIA GPU on this machine (/dev/nvidia0)" >&2; exit 1; fi
	@[ -d $(CACHE)/cuda ] || $(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target $(CACHE)/cuda nvidia-cuda-runtime-cu12
	@mkdir -p build/gpu
	@OUT=$(CURDIR)/build/gpu $(PYTHON) -m pytest tests/gpu -s
	@PYTHONPATH=tests $(PYTHON) -m gpu.measure --out build/gpu

# --- the two commands --------------------------------------------------------------------------------------------------

demo: setup-demo
	@$(PYTHON) scripts/demo.py --nccl $(DEMO_NCCL) $(if $(PID),--pid $(PID))

fleet: setup-demo $(CACHE)/stamps/fleet-packages
	@$(PYTHON) scripts/show_fleet.py --nccl $(DEMO_NCCL) $(if $(ONCE),--once)

# Tests on real jobs, and of servers and browsers, wait for three quarters of their time: so many at a time, a file's one after the other.
# Those marked `paced` measure what slow links set: they come behind, two at a time. Those marked `quiet` measure time or take much of
# the machine: one at a time. Last the guest, which takes all there is.
LANES := 4
PAIRS := 2
# What takes long and has a shorter test beside it is left to `make test-all`.
SHORT := $(if $(NCCLWATCH_ALL),, and not long)
LANES_CACHE := $(CACHE)/pytest-lanes
IN_LANES := -m pytest tests --ignore=tests/unit -m "not (paced or quiet or vm or gpu)$(SHORT)" -o cache_dir=$(CURDIR)/$(LANES_CACHE)
PACED_CACHE := $(CACHE)/pytest-paced
PACED := -m pytest tests/testbed -m "paced and not quiet$(SHORT)" -o cache_dir=$(CURDIR)/$(PACED_CACHE)
ALONE_CACHE := $(CACHE)/pytest-alone
ALONE := -m pytest tests --ignore=tests/unit -m "(quiet or vm or gpu)$(SHORT)" -o cache_dir=$(CURDIR)/$(ALONE_CACHE)
SLOWEST := --durations=30 --durations-min=5
# What fails runs once more, when nothing runs beside it. A fault fails again. What passes then is named, and is to be looked into: it
# depends on the load. More than a few are no accident.
# $(1): variable of the shell with the exit status; $(2): pytest's arguments; $(3): its cache.
FEW := 4
define once_more
if [ $$$(1) -eq 1 ] && few=$$(grep -c '::' $(3)/v/cache/lastfailed) && [ $$few -le $(FEW) ]; then \
  echo "==> once more: what failed above. What passes now depends on the load: look into it"; \
  $(1)=0; $(PYTHON) $(2) --last-failed --last-failed-no-failures none -v || $(1)=$$?; \
fi
endef
# Lint needs the Python environment alone: it runs while libraries are fetched and the testbed is built.
test: $(CACHE)/stamps/venv
	@rm -rf $(LANES_CACHE) $(PACED_CACHE) $(ALONE_CACHE) $(READY); \
	$(MAKE) -s beside >$(CACHE)/beside.log 2>&1 & beside=$$!; \
	$(MAKE) -s setup || { kill $$beside; exit 1; }; \
	touch $(READY); \
	echo "==> tests on real jobs and in the guest; beside them lint, types and unit tests, whose output follows"; \
	export NCCLWATCH_REQUIRE_VM=$${NCCLWATCH_REQUIRE_VM-$(if $(CI),1)}; \
	lanes=0; $(PYTHON) $(IN_LANES) -n $(LANES) --dist loadfile $(SLOWEST) || lanes=$$?; \
	paced=0; $(PYTHON) $(PACED) -n $(PAIRS) --dist loadfile $(SLOWEST) || paced=$$?; \
	alone=0; NCCLWATCH_BESIDE=$$beside $(PYTHON) $(ALONE) $(SLOWEST) || alone=$$?; \
	other=0; wait $$beside || other=$$?; \
	echo "==> lint, types and unit tests"; cat $(CACHE)/beside.log; \
	$(call once_more,lanes,$(IN_LANES),$(LANES_CACHE)); \
	$(call once_more,paced,$(PACED),$(PACED_CACHE)); \
	$(call once_more,alone,$(ALONE),$(ALONE_CACHE)); \
	[ $$lanes -eq 0 ] && [ $$paced -eq 0 ] && [ $$alone -eq 0 ] && [ $$other -eq 0 ]

UNIT_CACHE := $(CACHE)/pytest-unit
UNIT := -m pytest tests/unit $(if $(NCCLWATCH_ALL),,-m "not long") -o cache_dir=$(CURDIR)/$(UNIT_CACHE)
# Two processes; a file's tests stay in one, since they share what is costly to make.
UNIT_SPREAD := -n 2 --dist loadfile
# What needs no real job gets what the real jobs leave of the CPUs, so that these hardly notice it.
WHEN_IDLE := chrt --idle 0
READY := $(CACHE)/set-up
beside:
	@failed=0; $(WHEN_IDLE) $(MAKE) -s lint || failed=1; \
	until [ -e $(READY) ]; do sleep 1; done; \
	rm -rf $(UNIT_CACHE); unit=0; $(WHEN_IDLE) $(PYTHON) $(UNIT) $(UNIT_SPREAD) || unit=$$?; \
	$(call once_more,unit,$(UNIT),$(UNIT_CACHE)); \
	[ $$failed -eq 0 ] && [ $$unit -eq 0 ]

# The same with every release of NCCL in each test, in the guest as well, and with the tests marked `long`: hours.
test-all:
	@NCCLWATCH_ALL=1 NCCLWATCH_VM_FULL=1 NCCLWATCH_FUZZ_S=60 $(MAKE) -s test

lint:
	@echo "==> ruff, import contracts, shape and mypy"
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(VENV)/bin/lint-imports --no-cache --no-logo
	@$(PYTHON) scripts/check_shape.py
	@$(PYTHON) -m mypy

# Single layers, for working on one of them.
unit:
	@$(PYTHON) $(UNIT) $(UNIT_SPREAD)
attach:
	@$(PYTHON) -m pytest tests/testbed
vm:
	@$(PYTHON) -m pytest tests/vm


# aarch64: Debian's arm64 in an emulated guest, with NCCL's wheel for it (tests/vm/aarch64.py). Not part of `make test`.
vm-aarch64: setup-demo
	$(call apt_install,$(shell sed -e 's/\#.*//' tests/vm/packages-aarch64.txt))
	@PYTHONPATH=src:tests $(PYTHON) -m vm.aarch64

bench: setup
	@for file in tests/benchmarks/bench_*.py; do echo "==> $$file"; $(PYTHON) $$file; done

# Hostile input, guided by coverage (tests/fuzz); a quick pass of it is part of the unit tests, which need no atheris.
INPUTS := 1000000
fuzz: $(CACHE)/stamps/venv
	@[ -d $(CACHE)/fuzz ] || $(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target $(CACHE)/fuzz -r tests/fuzz/requirements.txt
	@PYTHONPATH=tests $(PYTHON) -m fuzz $(TARGETS) --inputs $(INPUTS) --seed $(SEED)

# The scoreboard: simulated records, scored against what each scenario expects. `eval` keeps to a few minutes.
eval: $(CACHE)/stamps/venv
	@PYTHONPATH=tests $(PYTHON) -m score --set ci --json build/score.json --markdown build/score.md
eval-full: setup
	@PYTHONPATH=tests $(PYTHON) -m score --set full --json build/score-full.json --markdown build/score-full.md
	@$(MAKE) -s eval-real SET=full NCCL=2.21.5,2.27.5,2.32.3 TRANSPORT=socket,shm
	@PYTHONPATH=tests $(PYTHON) -m vm.hangs --json build/score-guest.json
	@PYTHONPATH=tests $(PYTHON) -m vm.slow

# Scenarios played by real NCCL on the CPU testbed (root). Hours with SET=full and all settings; TRIES and SEED vary their moments.
SET := ci
TRIES := 1
SEED := 1
eval-real: setup
	@PYTHONPATH=tests $(PYTHON) -m score --real --set $(SET) $(NCCL:%=--nccl %) $(TRANSPORT:%=--transport %) --tries $(TRIES) \
	  --seed $(SEED) --jobs $(if $(filter ci,$(SET)),4,1) --json build/score-real.json --markdown build/score-real.md --save build/recordings

# Weights and thresholds of the slowness estimate, from what was weighed of jobs with known faults and healthy ones (OBSERVATIONS), from
# recordings (RECORDINGS: folders that `python -m score --real ... --save FOLDER` filled) and from simulated jobs. Fresh seeds judge
# the result, never these.
OBSERVATIONS := tests/fixtures/slowness.xz tests/fixtures/slowness-one-moment.xz
RECORDINGS :=
# Weights are fitted to the former; from which probability on somebody is named comes from jobs that no weight has seen.
UNFITTED := tests/fixtures/slowness-unfitted.xz
CALIBRATION := src/ncclwatch/engine/slow/calibration.json
calibrate: setup
	@PYTHONPATH=tests $(PYTHON) -m score.slowness --observations $(OBSERVATIONS) --recordings $(RECORDINGS) \
	  --out $(CALIBRATION)
	@PYTHONPATH=tests $(PYTHON) -m score.slowness --observations $(UNFITTED) --keep-weights --out $(CALIBRATION)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
