# trainctl for GPUs, with DeepSpeed's operators compiled:
#   docker build --tag trainctl .
#   docker run --gpus all --shm-size 8g --volume "$PWD":/work trainctl trainctl launch recipe=tiny
# Only apt and pip fetch anything here (tests/test_dockerfile.py).

# The toolkit's CUDA must have the major version of torch's. `devel` has nvcc, for operators and kernels.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04

FROM ${CUDA_IMAGE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
      ccache g++ git libaio-dev make openssh-client python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash trainctl \
    && install --directory --owner trainctl --group trainctl /home/trainctl/.cache /work
RUN python3 -m venv /opt/trainctl
ENV PATH=/opt/trainctl/bin:$PATH

FROM base AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY trainctl trainctl
COPY conf conf
COPY recipes recipes
COPY docs/records.md docs/records.md
COPY docs/troubleshooting docs/troubleshooting
RUN --mount=type=cache,target=/root/.cache/pip pip install build
RUN --mount=type=cache,target=/root/.cache/pip python -m build --wheel --outdir dist

FROM base AS installed
WORKDIR /source
ARG EXTRAS=finetune,track,eval
COPY --from=wheel /source/dist dist
RUN --mount=type=cache,target=/root/.cache/pip pip install "$(ls dist/*.whl)[$EXTRAS]"
# DeepSpeed again, from source: it compiles operators only where torch is installed already. No GPU is
# visible here, so its kind and architectures are named.
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0"
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=cache,target=/root/.cache/ccache \
    PATH=/usr/lib/ccache:$PATH CCACHE_DIR=/root/.cache/ccache CCACHE_BASEDIR=/tmp \
    CCACHE_NOHASHDIR=1 DS_ACCELERATOR=cuda \
    DS_BUILD_AIO=1 DS_BUILD_CPU_ADAM=1 DS_BUILD_CPU_LION=1 DS_BUILD_FUSED_ADAM=1 \
    DS_BUILD_FUSED_LAMB=1 DS_BUILD_FUSED_LION=1 DS_BUILD_QUANTIZER=1 \
    pip install --no-deps --no-build-isolation --no-cache-dir --force-reinstall \
      --no-binary deepspeed "deepspeed==$(pip list --format freeze | sed -n s/^deepspeed==//p)"

USER trainctl
WORKDIR /work
CMD ["trainctl", "--help"]
