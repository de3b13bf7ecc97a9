"""The offline half of Rutter: journals in, artifact out; and the simulator."""
