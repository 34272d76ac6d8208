"""The router's gRPC: the Inference service that clients call, and its side of Scheduler."""
