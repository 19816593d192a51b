"""Model APIs through which agents that know nothing of this service are driven and recorded, exact to the token."""
