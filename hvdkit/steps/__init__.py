"""The eight steps, framework-neutral: what each one computes, with the standard library and NumPy at most."""
