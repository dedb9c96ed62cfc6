"""Many jobs: hearing workers that reduce what agents send, and one judge a job, over NATS JetStream (docs/fleet.md)."""
