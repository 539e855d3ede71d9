# Open MPI where mpirun starts its daemons by ssh, since nothing else can run fenka's launch agent.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
      openmpi-bin openssh-client openssh-server > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /etc/ssh/ssh_host_* /usr/bin/python3*
CMD ["sleep", "infinity"]
