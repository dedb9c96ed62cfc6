"""What is known besides the records of a job: what was seen → likely cause → what to do, as tables of data."""
