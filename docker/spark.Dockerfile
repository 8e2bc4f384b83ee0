# Preparation with Spark: no torch, no CUDA. From the root of the repository:
#   docker build -t trainmark-spark -f docker/spark.Dockerfile .
#   docker run -v "$PWD":/workspace trainmark-spark criteo --engine spark --input 'raw/day_*' --output data
# Versions are those of constraints.txt. The same image serves as driver and as executor.
FROM python:3.11.13-slim-bookworm
LABEL trainmark.pyspark="4.1.4" \
      trainmark.pyarrow="26.0.1" \
      trainmark.pandas="3.1.1"

# PySpark 4 runs on Java 17.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/trainmark
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY trainmark trainmark
# What preparation needs of the core dependencies: torch alone would be most of the image.
RUN pip install --no-cache-dir --constraint constraints.txt \
        numba numpy pandas psutil pyarrow pydantic pyspark pyyaml rich tyro \
 && pip install --no-cache-dir --constraint constraints.txt --no-deps .

WORKDIR /workspace
ENTRYPOINT ["trainmark", "prepare"]
