#!/bin/sh
# Runs apt-get as a user who is not root, where the root is read-only: with folders of its own for what it keeps.
set -eu
mkdir -p /work/apt/lists/partial /work/apt/archives/partial
cd /work/apt
exec apt-get -o Dir::State=/work/apt -o Dir::Cache=/work/apt -o Acquire::Languages=none "$@"
