"""Messages between the processes of a job, before and after the job starts."""
