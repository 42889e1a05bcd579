"""Inside the training process: doors that serve artifacts, proof of identity, the gate, one report per rank."""
