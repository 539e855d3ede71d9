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
NVIDIA  := $(shell $(PYTHON) -c 'import os, importlib.util as util; print(os.path.relpath(os.path.dirname(util.find_spec("nvidia.cu13").submodule_search_locations[0])))')
# NVIDIA's headers come from their wheels at build time and are never committed.
CUDA_INCLUDE := $(NVIDIA)/cu13/include
# Headers of libcuda.so.1 beside cuda.h. Those of graphics include OpenGL's, EGL's and VDPAU's, and are read as text.
CUDA_BESIDE  := $(patsubst %,$(CUDA_INCLUDE)/%.h,cudaProfiler cudaGL cudaEGL cudaVDPAU)
CUDA_TYPEDEFS := $(patsubst %,$(CUDA_INCLUDE)/%Typedefs.h,cuda cudaProfiler cudaGL cudaEGL cudaVDPAU)
OUT     := $(ROOT)/src/fenka/_native
BUILD   := $(ROOT)/native/build
# A release has no debug information: it would name the folders of the build.
DEBUG   ?= -g
CFLAGS  := -std=gnu11 -O2 $(DEBUG) -fPIC -fvisibility=hidden -fno-sanitize=undefined \
           -Wall -Wextra -Werror -Werror=implicit-function-declaration -Wno-deprecated-declarations \
           -I$(ROOT)/native/include -isystem $(CUDA_INCLUDE)
