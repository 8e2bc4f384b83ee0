# Training. From the root of the repository:
#   docker build -t trainmark .
#   docker run --gpus all --ipc host -v "$PWD":/workspace trainmark train dlrm-demo
# Versions are those of constraints.txt; torch's wheels bring CUDA, the host only its driver.
FROM python:3.11.13-slim-bookworm
LABEL trainmark.torch="2.13.0" \
      trainmark.torchx="0.7.0" \
      trainmark.transformers="5.22.2"

# Triton compiles the start of its kernels with gcc; `launch --numa` binds ranks with numactl.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev numactl \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/trainmark
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY trainmark trainmark
RUN pip install --no-cache-dir --constraint constraints.txt '.[export,fast,launch,plots,search,serve,text]'

WORKDIR /workspace
ENTRYPOINT ["trainmark"]
