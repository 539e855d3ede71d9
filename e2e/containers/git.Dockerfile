# git, which clones a job's code, and serves a repository in the tests.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends git > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
CMD ["git", "--version"]
