"""Files that come to a host before a job, and leave it afterwards."""
