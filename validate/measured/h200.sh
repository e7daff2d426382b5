#!/usr/bin/env bash
# What lies here of an H200's profile, measured anew on this machine's card: into OUT, for a person to look at before
# any of it is committed. Parts go in this order; without names, all of them, some forty minutes.
#
#   validate/measured/h200.sh OUT [calibrate] [quick] [held_out] [tiles] [decode_step] [linear_attention]
#                                 [decoder_layer] [codellama_34b] [contention] [power] [tests]
#
# `calibrate` writes the profile of this checkout and keeps it in OUT/profile, too. Without `calibrate` OUT/profile, if
# there is one, is put into the checkout first, so that parts may be measured in several goes. What triton compiles is
# kept in OUT/triton, of `quick` in OUT/triton-quick, so that each of the two compiles all. SEED: of the shapes that are
# held out (a profile is judged by shapes that nobody has looked at: take a new one). Exit code: of the first part that
# failed; where that is `calibrate`, the others, which would be by another profile, do not run.
set -uo pipefail
parts=(calibrate quick held_out tiles decode_step linear_attention decoder_layer codellama_34b contention power tests)
[ -n "${1:-}" ] || { echo "OUT is missing: where to write" >&2; exit 2; }
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/../.." || exit
[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
    [[ " ${parts[*]} " == *" $part "* ]] || { echo "$part: is no part (${parts[*]})" >&2; exit 2; }
done
profile=devices/profiles/h200-sxm/local
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "PYTHON: there is no $python" >&2; exit 2; }
mkdir -p "$out/runs" || exit 2
export TRITON_CACHE_DIR=$out/triton

# A scenario of scenarios/h200, with the fields that are set.
ladder() {
    # Not by --out: provenance.json would have it in its command.
    local status=0 run=runs/${1//_/-}-h200/validate-cuda
    rm -rf "$run" "$out/runs/$1"
    "$python" -m simcore validate "scenarios/h200/$1.yaml" --on cuda "${@:2}" || status=$?
    [ ! -d "$run" ] || cp -r "$run" "$out/runs/$1"
    return $status
}

calibrate() {
    time "$python" -m simcore calibrate --on cuda || return
    rm -rf "$out/profile" && cp -r $profile "$out/profile"
}

quick() {
    local status=0
    time TRITON_CACHE_DIR=$out/triton-quick "$python" -m simcore calibrate --on cuda --quick --out "$out/quick" ||
        status=$?
    "$python" -m simcore.validate.accuracy.two_calibrations $profile "$out/quick" --out "$out/h200_two_calibrations.csv" || status=$?
    return $status
}

held_out() { "$python" -m simcore.validate.accuracy.held_out --count 50 --seed "${SEED:-29}" --out "$out/h200_held_out.csv"; }

tiles() { ladder tiles --set tokens=256; }

decode_step() {
    ladder decode_step --set 'batch=[1, 3, 6, 11, 24, 36]' \
        --set 'context_tokens=[1549, 3826, 9799, 12501, 33240, 62828]'
}

linear_attention() {
    ladder linear_attention --set 'batch=[1, 5]' --set 'decay=[true]' --set 'length=[700, 3000]'
}

decoder_layer() { ladder decoder_layer --set 'batch=[1, 5, 37]' --set 'context_tokens=[1537, 11003]'; }

codellama_34b() { ladder codellama_34b; }

contention() {
    "$python" -m simcore.validate.accuracy.contention --repeats 2 --contexts 1024,8192 --sides 32,64,128,256,512,1024 \
        --out "$out/h200_contention.csv"
}

power() { "$python" -m simcore.validate.accuracy.power --out "$out/h200_power.csv"; }

tests() {
    "$python" -m pytest -q -p no:cacheprovider -m gpu tests/test_card_on_gpu.py tests/test_card_real.py \
        tests/test_contention.py tests/test_placed.py tests/test_card_long_convolution.py \
        tests/test_allocator.py tests/test_cuda_machine.py
}

if [[ " $* " != *" calibrate "* && -f $out/profile/profile.yaml ]]; then
    rm -rf $profile && cp -r "$out/profile" $profile
fi
trap 'exit 130' INT
first=0
for part in "$@"; do
    status=0
    echo "== $part, $(date -u +%FT%TZ)"
    "$part" || status=$?
    echo "== $part: exit code $status"
    [ "$status" -ne 130 ] || exit 130
    [ "$part" != calibrate ] || [ "$status" -eq 0 ] || exit "$status"
    [ "$first" -ne 0 ] || first=$status
done
exit "$first"
