"""The reference: what the theorems say, in NumPy (float64) and mpmath; one module per contract, slow, exact, readable.

Only what is stored (scales, witness, sketch units) is rounded towards safety. A certificate that must hold to the last
bit is evaluated in `golden` (50 digits), or rounded up by whoever reports it.
"""
