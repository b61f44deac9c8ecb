#!/bin/sh
# Packs TRL and what it needs beside torch and transformers, for a machine without a network:
#
#     benchmarks/peers/pack_trl.sh trl.tar.xz                    # here; 3.12 and x86_64 unless said otherwise
#     mkdir .trl && tar -xJf trl.tar.xz -C .trl                  # there; dill wants the folder called site-packages
#     PYTHONPATH=.trl/site-packages python benchmarks/time_to_reward.py --trl-python python3 --device cuda …
#
# Parts of pyarrow that nothing here uses are left out: 30 MB instead of 70.
set -eu
out=$(realpath "$1")
python=${2:-3.12}
machine=${3:-x86_64}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip --disable-pip-version-check download -qq --no-deps --only-binary :all: --python-version "$python" \
    --platform "manylinux_2_28_$machine" --platform "manylinux2014_$machine" --platform "manylinux_2_24_$machine" \
    --dest "$folder/wheels" trl==1.16.0 datasets peft pyarrow pandas multiprocess dill xxhash
mkdir -p "$folder/packages/site-packages"
for wheel in "$folder"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$folder/packages/site-packages"
done
cd "$folder/packages/site-packages"
rm -rf pandas/tests pyarrow/tests pyarrow/include pyarrow/*flight* pyarrow/libarrow_s3* pyarrow/_s3fs*
tar -cJf "$out" -C .. site-packages
