"""Which device holds which part of which table. No torch."""
