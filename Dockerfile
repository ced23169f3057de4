# UNBUILT: written on a machine without Docker, and not built anywhere yet.
# longctx on a machine with NVIDIA GPUs (docs/commands.md#docker).
#
#   docker build -t longctx .
#   docker run --rm --gpus all longctx doctor
#
# The image is CUDA's runtime: torch's wheel brings its own CUDA libraries, and Triton and
# flash-attn-4 bring their compilers. DeepSpeed compiles its operators with nvcc: for it, build with
# --build-arg CUDA=13.0.1-devel-ubuntu24.04 --build-arg EXTRAS=fa4,lora,profile,deepspeed
ARG CUDA=13.0.1-base-ubuntu24.04
FROM nvidia/cuda:${CUDA}

# A C compiler and Python's headers: Triton compiles its launcher on first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=fa4,lora,profile
COPY . /tmp/longctx
RUN python3 -m venv /opt/longctx \
    && /opt/longctx/bin/pip install --no-cache-dir "/tmp/longctx[${EXTRAS}]" \
    && rm -rf /tmp/longctx

# Not root. Caches (tokens, kernels, models) lie in the user's home: mount it to keep them.
RUN useradd --create-home --uid 10001 longctx
USER longctx
WORKDIR /home/longctx
ENV PATH=/opt/longctx/bin:$PATH PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
ENTRYPOINT ["longctx"]
CMD ["doctor"]
