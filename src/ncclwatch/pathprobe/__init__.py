"""Active probes of a path, from processes of our own and never by way of the job: TCP round trips, zero-payload RDMA writes."""
