"""The examples of the repository, for those who installed the package alone."""
