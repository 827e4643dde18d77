#!/usr/bin/env bash
# Installs this checkout beside a GPU machine's own torch (wheels it lacks lie in .whl) and runs a command.
set -euo pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
python3 -m pip install -q --no-index --no-deps --no-compile --no-build-isolation --upgrade --target /tmp/site . 2>&1 | tail -5
export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1
exec "$@"
