#!/usr/bin/env bash
# All that we ask of a GPU, once, on a machine that may be borrowed: one JSON, within ten minutes. Each part has its own limit;
# what is left when they are over does not run.
#     bash ci/gpu_once.sh OUT.json          on CUDA devices
#     bash ci/gpu_once.sh OUT.json sim      the same parts on simulated devices, to know that the script works
# A part that cannot run says why and never counts as passed; the rest runs. Exit code 0: every part passed. 1: a part failed.
# 3: nothing failed, and a part did not run.
set -u
out=${1:?usage: bash ci/gpu_once.sh OUT.json [DEVICE]}
device=${2:-cuda}
python=${PYTHON:-python}
budget=600
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
if [ "$device" = sim ]; then
    export PYTHONPATH="$PWD/examples/vendor${PYTHONPATH:+:$PYTHONPATH}"
    mkdir -p "$logs/site/sim-0.dist-info"
    printf '[fsdp_testing.backends]\nsim = simdevice.testing:SIM\n' > "$logs/site/sim-0.dist-info/entry_points.txt"
    printf 'Metadata-Version: 2.1\nName: sim\nVersion: 0\n' > "$logs/site/sim-0.dist-info/METADATA"
    export PYTHONPATH="$logs/site:$PYTHONPATH"
fi

declare -A unavailable  # why a backend cannot have so many ranks here, asked once: torch takes seconds to import

ask() {  # BACKEND RANKS
    [ -z "${unavailable[$1 $2]+asked}" ] || return 0
    local reason
    reason=$("$python" -c "
import sys
from fsdp_testing.base.backends import backend_named
print(backend_named(sys.argv[1]).unavailable(int(sys.argv[2])) or '')" "$1" "$2" 2>&1) ||
        reason="the backend cannot be asked: $(tail -n 1 <<< "$reason")"
    unavailable[$1 $2]=$reason
}

part() {  # NAME SECONDS BACKEND RANKS COMMAND...: runs if the backend can have so many ranks here; a NAME-on-cuda on CUDA alone
    local name=$1 limit=$2 backend=$3 ranks=$4 reason="" code begun=$SECONDS left=$((budget - SECONDS))
    shift 4
    [ "$device" = cuda ] || backend=$device
    echo "== $name"
    if [[ "$name" = *-on-cuda && "$device" != cuda ]]; then
        reason="needs CUDA"
    elif ((left > 0)); then
        ask "$backend" "$ranks"
        reason=${unavailable[$backend $ranks]}
        left=$((budget - SECONDS))
    fi
    if [ -z "$reason" ] && ((left <= 0)); then
        reason="ten minutes are over"
    fi
    if [ -n "$reason" ]; then
        code=-1
    else
        timeout $((limit < left ? limit : left)) "$@" > "$logs/$name.log" 2>&1
        code=$?
        tail -n 3 "$logs/$name.log"
    fi
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begun))" "$backend" "$ranks" "$reason" >> "$logs/parts.tsv"
}

pytest=("$python" -m pytest -q -m gpu --device "$device" -p no:cacheprovider)
verify() { echo "$python" -m fsdp_testing.cli run; }
many=nccl; [ "$device" = cuda ] || many=$device
shared=gloo-cuda; [ "$device" = cuda ] || shared=$device
order=tests/fsdp_ref/behaviours/gpu/test_cuda_order.py
settings=tests/fsdp_ref/behaviours/gpu/test_cuda_settings.py
known=(--explain 0 --expected-failures fsdp_testing/checks/findings/known_failures.toml)

part one-rank 90 nccl 1 "${pytest[@]}" tests/acceptance/test_gpu.py -k "nccl or 1 or over_devices"
part nccl-shared 60 nccl-shared 2 "${pytest[@]}" tests/acceptance/test_gpu.py -k ranks_share
part shared-devices 150 gloo-cuda 2 "${pytest[@]}" tests/fsdp_ref/behaviours/gpu -k "Shared and (is_that_of_one_process or offloaded_parameters or frees)"
part no-host-wait 60 nccl 1 "${pytest[@]}" tests/fsdp_ref/behaviours/gpu -k "stop_the_host or does_not_wait"
part streams 100 gloo-cuda 2 $(verify) fsdp_ref-wrapper torch-fsdp2 --backend "$shared" --check streams.training --check streams.summon "${known[@]}"
part conformance 150 gloo-cuda 2 $(verify) fsdp_ref-composable torch-fsdp2 --backend "$shared" --check training --check offload --check mixed_precision "${known[@]}"
part order 60 gloo-cuda 2 "${pytest[@]}" "$order" -k "(sleep or freed) and (orig-FULL_SHARD or shows or too_early)"
part peak-memory 30 gloo-cuda 2 "${pytest[@]}" "$order" -k "planned and FULL_SHARD"
part half-precision 40 gloo-cuda 2 "${pytest[@]}" "$order" -k "scale or pinned or captured"
part late-or-not 60 gloo-cuda 2 "${pytest[@]}" "$settings" -k bits
part sanitizer-on-cuda 60 gloo-cuda 2 "${pytest[@]}" "$settings" -k sanitizer
part overlap-on-cuda 30 nccl 2 "${pytest[@]}" "$order" -k overlap
part two-gpus 90 nccl 2 $(verify) fsdp_ref-composable torch-fsdp2 --backend "$many" --check training "${known[@]}"

"$python" - "$logs" "$out" "$device" <<'PY'
import datetime
import json
import pathlib
import platform
import sys

import torch

logs, out, device = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
parts = []
for line in (logs / "parts.tsv").read_text().splitlines():
    name, code, seconds, backend, ranks, reason = line.split("\t")
    verdict = "did not run" if reason else {"0": "pass", "3": "unknown", "124": "unknown"}.get(code, "fail")
    why = reason or ("its time was over" if code == "124" else "")
    log = logs / f"{name}.log"
    end = log.read_text(errors="replace").splitlines()[-60:] if log.exists() else []
    parts.append({"name": name, "verdict": verdict, "why": why, "exit_code": int(code), "seconds": int(seconds),
                  "backend": backend, "ranks": int(ranks), "end_of_output": end})
cuda = torch.cuda.is_available()
report = {
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "device": torch.cuda.get_device_name() if cuda and device == "cuda" else device,
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "nccl": list(torch.cuda.nccl.version()) if cuda else None,
    "parts": parts,
}
out.write_text(json.dumps(report, indent=1) + "\n")
for part in parts:
    print(f"{part['verdict']:12} {part['name']} ({part['seconds']} s) {part['why']}")
verdicts = {part["verdict"] for part in parts}
sys.exit(1 if "fail" in verdicts else 0 if verdicts == {"pass"} else 3)
PY
