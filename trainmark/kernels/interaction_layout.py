"""How wide the output of the dot interaction is: what its kernels for GPUs and for CPUs share."""

PAD_TO = 8  # widths that tensor cores like


def output_width(num_rows: int, dim: int) -> int:
    """Width of the interaction of `num_rows` embedding rows and one dense vector of width `dim`."""
    dots = num_rows * (num_rows + 1) // 2
    return -(-(dim + dots) // PAD_TO) * PAD_TO
