"""Reports of runs: where the time of training goes (`RunReport`)."""
