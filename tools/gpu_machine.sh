#!/usr/bin/env bash
# Runs tools/gpu_first.py on a bare machine that has a GPU and torch: installs what is missing in a folder of its
# own, beside the torch that is there, and leaves the results in $OUT (runs/gpu).
#
# Where no registry can be reached, carry the wheels: `tools/gpu_machine.sh --prepare` puts them into .whl here,
# for Python 3.12 on x86-64 (PYTHON_VERSION). Other arguments are those of gpu_first.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} wheels=${WHEELS:-.whl}
# Without dependencies: torch, numpy, triton and pytest are there, and pip would bring torch again.
pure=(
  deepspeed==0.19.8 transformers==5.23.0 hjson py-cpuinfo shtab filelock annotated-types typing-inspection
  typing-extensions
)
binary=(pydantic==2.14.4 pydantic-core==2.50.5)
pip=("$python" -m pip --disable-pip-version-check)

if [[ ${1:-} == --prepare ]]; then
  rm -rf "$wheels"
  "${pip[@]}" wheel -q --no-deps -w "$wheels" . "${pure[@]}"
  "${pip[@]}" download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$wheels" "${binary[@]}"
  exit
fi
export OUT=${OUT:-runs/gpu}
site=$(mktemp -d)
mkdir -p "$OUT"
if compgen -G "$wheels/*.whl" >/dev/null; then
  from=(--no-index "$wheels"/*.whl)
else
  from=(. "${pure[@]}" "${binary[@]}")
fi
"${pip[@]}" install -q --no-deps --no-compile --upgrade --target "$site" "${from[@]}"
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1
exec "$python" tools/gpu_first.py "$@"
