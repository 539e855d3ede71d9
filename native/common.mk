# Shared by the folders below: one compiler, one target, warnings are errors.
# zig's clang with an old glibc as target, so that the libraries load wherever the programs run.
# Paths are relative, since make cannot have targets with a space in their path.
ROOT    := $(dir $(lastword $(MAKEFILE_LIST)))..
# One line a step; V=1 shows the commands.
Q       := $(if $(V),,@)
PYTHON  ?= $(ROOT)/.venv/bin/python
ARCH    ?= $(shell uname -m)
ZIGCC   := $(PYTHON) -m ziglang cc -target $(ARCH)-linux-gnu.2.17
# The folder that has the package `nvidia`: pip builds with packages that are not in the interpreter's own folder.
NVIDIA  := $(shell $(PYTHON) -c 'import os, importlib.util as util; print(os.path.relpath(os.path.dirname(util.find_spec("nvidia.cuda_runtime").submodule_search_locations[0])))')
# NVIDIA's headers come from their wheels at build time and are never committed.
CUDA_INCLUDE := $(NVIDIA)/cuda_runtime/include
NVML_INCLUDE := $(NVIDIA)/nvml_dev/include
OUT     := $(ROOT)/src/fenka/_native
BUILD   := $(ROOT)/native/build
# A release has no debug information: it would name the folders of the build.
DEBUG   ?= -g
CFLAGS  := -std=gnu11 -O2 $(DEBUG) -fPIC -fvisibility=hidden -fno-sanitize=undefined \
           -Wall -Wextra -Werror -Werror=implicit-function-declaration \
           -I$(ROOT)/native/include -isystem $(CUDA_INCLUDE) -isystem $(NVML_INCLUDE)
