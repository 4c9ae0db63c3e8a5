# HAL on the CPU, with the extras of training, megatron-core and the tests: see docs/container.md for other devices.
ARG BASE=python:3.11-slim
FROM ${BASE}
# A compiler for the kernels of cpu_ref, which are compiled at their first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ make git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hal
COPY . .
# The tests and tools run from the checkout, so the installation is editable. torch of the base image is kept if it fits.
ARG EXTRAS=train,megatron,test
RUN python -m pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]"
# Files that a run writes are 0640 and 0750; the user is not root.
RUN useradd --create-home hal && mkdir -p /work && chown hal /work
USER hal
WORKDIR /hal-run
ENTRYPOINT ["hal"]
CMD ["doctor"]
