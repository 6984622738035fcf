"""From a user's module to units: what is ignored, what a policy chooses, which unit owns which parameter."""
