# syntax=docker/dockerfile:1
# docker build --target cpu  --tag condensegrpo:cpu  .
# docker build --target cuda --tag condensegrpo:cuda .
# docs/how-to/launch.md says how to run them, and when to build with --build-arg USER=root.

FROM python:3.12.12-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY condensegrpo condensegrpo
COPY condensers condensers
COPY rewards rewards
COPY cli cli
COPY configs configs
COPY studies studies
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.12-slim-bookworm AS cpu
ARG USER=condensegrpo
# g++ compiles parts of DeepSpeed
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 condensegrpo && install --directory --owner=condensegrpo /cache /workspace/runs
RUN --mount=from=wheel,source=/wheels,target=/wheels --mount=source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[train]"
ENV HF_HOME=/cache/huggingface
WORKDIR /workspace
VOLUME ["/cache", "/workspace/runs"]
USER ${USER}
ENTRYPOINT ["condensegrpo"]
CMD ["--help"]

FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS cuda
ARG USER=condensegrpo
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 condensegrpo \
    && install --directory --owner=condensegrpo /cache /workspace/runs && python3.12 -m venv /opt/condensegrpo
ENV PATH=/opt/condensegrpo/bin:$PATH HF_HOME=/cache/huggingface
RUN --mount=from=wheel,source=/wheels,target=/wheels --mount=source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[train,vllm]"
WORKDIR /workspace
VOLUME ["/cache", "/workspace/runs"]
USER ${USER}
ENTRYPOINT ["condensegrpo"]
CMD ["--help"]
