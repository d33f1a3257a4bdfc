#!/usr/bin/env bash
# Renews every lock in this folder; `make lock` runs it. One lock serves Python 3.10 to 3.13.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=2.13.0
# Of torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, from PyTorch's own CPU index.
CPU_WHEEL=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
export UV_CUSTOM_COMPILE_COMMAND="make lock" UV_PYTHON_DOWNLOADS=never
printf 'torch==%s\n' "$TORCH" > constraints/.torch.in
trap 'rm -f constraints/.torch.in' EXIT

resolve() { # OUTPUT, then inputs and options
  local output=$1
  shift
  "${UV:-uv}" pip compile --quiet --universal --python-version 3.10 --generate-hashes \
    --no-emit-package torch --output-file "constraints/$output" "$@"
}
lean() { resolve "$@" --config-file constraints/uv.toml -c constraints/.torch.in --upgrade; }

"${UV:-uv}" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-deps \
  --no-annotate constraints/.torch.in --upgrade --output-file constraints/torch.txt
cat > constraints/torch-cpu.txt <<END
# The CPU build for Python 3.11 on Linux, which PyPI does not have; \`make lock\` writes this file.
torch==$TORCH+cpu \\
    --hash=$CPU_WHEEL
END
lean test.txt pyproject.toml constraints/build.in --extra dev --extra ray-serve
lean demo.txt pyproject.toml constraints/build.in --extra report -c constraints/test.txt
lean serve.txt pyproject.toml constraints/build.in --extra postgres --extra otel \
  -c constraints/test.txt
lean docs.txt pyproject.toml constraints/build.in --extra docs -c constraints/test.txt
lean app.txt pyproject.toml constraints/build.in constraints/app.in --extra app
lean parity.txt pyproject.toml constraints/build.in constraints/parity.in
lean lowest.txt pyproject.toml constraints/build.in --extra dev --resolution lowest-direct
resolve cuda.txt constraints/.torch.in -c constraints/demo.txt --upgrade
