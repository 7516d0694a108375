"""One problem whose rows several processes hold: what more of them are good for."""
