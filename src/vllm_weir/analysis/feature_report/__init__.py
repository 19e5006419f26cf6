"""Reports on the features of a sparse autoencoder, from features of a dataset."""
