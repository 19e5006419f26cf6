"""Features of sparse autoencoders in files: sparse, as Parquet, with a row for each token."""
