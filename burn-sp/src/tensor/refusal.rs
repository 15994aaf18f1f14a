use std::fmt;

/// Why an operation is not allowed on these layouts, and what would be. Operations panic with its text, as Burn's do
/// on shapes that do not fit; in a launched rank that becomes an error of every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The operation.
    pub operation: &'static str,
    /// What is wrong with which layouts.
    pub reason: String,
    /// What would work.
    pub help: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.operation, self.reason, self.help)
    }
}

impl Refusal {
    pub(crate) fn new(operation: &'static str, reason: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            operation,
            reason: reason.into(),
            help: help.into(),
        }
    }

    #[track_caller]
    pub(crate) fn refuse(self) -> ! {
        panic!("{self}")
    }
}
