# ds_ring with its quick start. Not built yet: no docker daemon runs where ds_ring is developed. A test checks that what
# is copied builds the package, and that pip is called as in README (tests/integration/test_dockerfile.py).
#   docker build -t ds_ring . && docker run --shm-size 1g ds_ring
#   docker build -t ds_ring --build-arg DEVICE=cuda . && docker run --gpus all --ipc host -it ds_ring bash
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS cpu
ENV DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

# With nvcc, by which DeepSpeed builds its optimizers. torch's wheels bring CUDA's other libraries.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
ENV DS_ACCELERATOR=cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*

FROM ${DEVICE}
# A compiler for torch.compile; ssh for launches on several hosts.
RUN apt-get update && apt-get install -y --no-install-recommends g++ openssh-client && rm -rf /var/lib/apt/lists/*
WORKDIR /ds_ring
COPY pyproject.toml README.md LICENSE ./
COPY ds_ring ds_ring
COPY launcher launcher
COPY configs configs
RUN python3 -m venv .venv && .venv/bin/pip install -q --no-cache-dir "torch==2.13.0" -e ".[train]"
ENV PATH=/ds_ring/.venv/bin:$PATH
CMD ["ds-ring", "launch", "configs/quickstart.yaml"]
