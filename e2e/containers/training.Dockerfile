# What training programs import: two MPIs, mpi4py, numba-cuda, TensorBoard; and the model server of the scenarios.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
# mpi4py looks for MPICH's library by the name that all MPIs of its family have.
RUN apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends openmpi-bin mpich > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && ln -s libmpich.so.12 /usr/lib/x86_64-linux-gnu/libmpi.so.12
ARG UV_VERSION=0.13.8
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_LINK_MODE=copy
COPY training.txt ./
# uv's cache is this machine's. The second copies of NVIDIA's compiler, and its assembler, are not used.
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check uv==${UV_VERSION} \
 && /opt/uv/bin/uv venv --quiet --no-project /opt/training \
 && /opt/uv/bin/uv pip install --quiet --python /opt/training/bin/python --require-hashes -r training.txt \
 && rm -r /opt/uv /opt/training/lib/python3*/site-packages/nvidia/cuda_nvcc/bin \
      /opt/training/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/*.alt.*
COPY model_server.py /opt/
# `mpirun` is Open MPI's.
ENV MPI4PY_MPIABI=openmpi \
    PATH=/opt/training/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
CMD ["sleep", "infinity"]
