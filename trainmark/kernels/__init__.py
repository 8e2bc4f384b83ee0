"""Operations that are worth a kernel, one file each: the plain-torch reference comes first."""
