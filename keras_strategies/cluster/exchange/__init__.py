"""Messages between the processes of a job, before and after it starts."""
