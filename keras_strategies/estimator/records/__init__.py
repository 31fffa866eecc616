"""What an Estimator writes while it runs, read and written."""
