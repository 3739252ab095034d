"""The engine: the only package that imports torch. Runs StepPlans on the pool it is given."""
