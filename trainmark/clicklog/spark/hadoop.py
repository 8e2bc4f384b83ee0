"""Files on any Hadoop path (local, hdfs:, s3a:, gs:, ...), through the JVM of a Spark session."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmark.errors import InputError

COPY_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class File:
    """A file that was found."""

    path: str
    name: str
    num_bytes: int


class Hadoop:
    """The few file operations that preparation needs.

    Example:
        files = Hadoop(spark)
        files.write_json("hdfs://namenode/data/prepare.json", {"rows": 3})
    """

    def __init__(self, spark: Any) -> None:
        self._jvm = spark.sparkContext._jvm
        self._configuration = spark.sparkContext._jsc.hadoopConfiguration()

    def _open(self, path: str) -> tuple[Any, Any]:
        """Hadoop's path, and the file system that it is on."""
        hadoop_path = self._jvm.org.apache.hadoop.fs.Path(path)
        system = hadoop_path.getFileSystem(self._configuration)
        # The local file system would put a checksum file beside every file.
        system.setWriteChecksum(False)
        return hadoop_path, system

    def glob(self, pattern: str) -> list[File]:
        """The files that match."""
        path, system = self._open(pattern)
        return [
            File(status.getPath().toString(), status.getPath().getName(), status.getLen())
            for status in system.globStatus(path) or []
            if status.isFile()
        ]

    def qualified(self, path: str) -> str:
        """The whole path, with its file system."""
        hadoop_path, system = self._open(path)
        return str(system.makeQualified(hadoop_path).toString())

    def exists(self, path: str) -> bool:
        hadoop_path, system = self._open(path)
        return bool(system.exists(hadoop_path))

    def is_empty_folder(self, path: str) -> bool:
        hadoop_path, system = self._open(path)
        return system.exists(hadoop_path) and not list(system.listStatus(hadoop_path))

    def remove(self, path: str) -> None:
        hadoop_path, system = self._open(path)
        system.delete(hadoop_path, True)

    def rename(self, source: str, target: str) -> None:
        """Move a folder to a name that is free."""
        path, system = self._open(source)
        if not system.rename(path, self._open(target)[0]):
            raise InputError(f"{source} cannot be renamed to {target}.")

    def join(self, parts: Sequence[File], target: str) -> None:
        """Write `parts`, each without its last byte, one after the other."""
        path, system = self._open(target)
        copy = self._jvm.org.apache.commons.io.IOUtils.copyLarge
        output = system.create(path, True)
        try:
            for part in parts:
                part_path, part_system = self._open(part.path)
                stream = part_system.open(part_path, COPY_BUFFER_BYTES)
                try:
                    copy(stream, output, 0, part.num_bytes - 1)
                finally:
                    stream.close()
        finally:
            output.close()

    def copy_from_local(self, source: str, target: str) -> None:
        path, system = self._open(target)
        system.copyFromLocalFile(self._jvm.org.apache.hadoop.fs.Path(f"file://{source}"), path)

    def write_json(self, path: str, data: Mapping[str, Any]) -> None:
        hadoop_path, system = self._open(path)
        output = system.create(hadoop_path, True)
        try:
            output.write(bytearray(json.dumps(data, indent=2).encode() + b"\n"))
        finally:
            output.close()

    def read_json(self, path: str) -> dict[str, Any]:
        """The object in a small file, empty if there is no such file."""
        if not self.exists(path):
            return {}
        hadoop_path, system = self._open(path)
        stream = system.open(hadoop_path)
        try:
            text = bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()
        data = json.loads(text)
        if not isinstance(data, dict):
            raise InputError(f"{path} should hold a JSON object.")
        return data
