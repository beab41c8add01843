#!/usr/bin/env bash
# Runs the tests of the fork in the active environment, where the fork has to
# be installed: python -m pip install ".[testing]".
set -euo pipefail

usage() {
  cat <<EOF
usage: bash tests/run_all_tests.sh [--only-pytest|--only-doctest|--only-upstream]...
  --only-pytest    our own tests
  --only-doctest   the doctests of our files
  --only-upstream  upstream's tests/nnx, unmodified
Without a flag, all of them.
EOF
}

pytests=false doctests=false upstream=false
for flag in "$@"; do
  case $flag in
    --only-pytest) pytests=true ;;
    --only-doctest) doctests=true ;;
    --only-upstream) upstream=true ;;
    --help) usage; exit 0 ;;
    *) echo "unknown flag: $flag" >&2; usage >&2; exit 2 ;;
  esac
done
if ! $pytests && ! $doctests && ! $upstream; then
  pytests=true doctests=true upstream=true
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python - <<EOF
import importlib.metadata as metadata, sys
versions = ', '.join(f'{p} {metadata.version(p)}' for p in ('jax', 'flax'))
print(f'python {sys.version.split()[0]}, {versions}')
EOF

if $doctests; then
  echo "--- doctests of our files"
  # By module name: by path pytest would not import them as parts of flax.
  modules=$(find flax -name '*.py' | sed -e 's/\.py$//' -e 's/\/__init__$//' \
    -e 's/\//./g' | sort)
  # shellcheck disable=SC2086
  python -m pytest -q --doctest-modules --pyargs $modules
fi
if $pytests; then
  echo "--- our tests"
  XLA_FLAGS=--xla_force_host_platform_device_count=8 \
    JAX_NUMPY_RANK_PROMOTION=raise \
    python -m pytest -q -n auto tests examples benchmarks
fi
if $upstream; then
  echo "--- upstream's tests"
  python tools/fork.py test-upstream
fi
echo "all passed"
