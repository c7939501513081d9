//! A table of values that wait for a completion, each found again by a small number.
//!
//! Memory is kept and reused, so a warmed-up table does not allocate. Its length is bounded by the
//! number of requests that drivers keep in flight.

/// Values in numbered places; a number is used again once its value is taken out.
#[derive(Debug)]
pub struct Pending<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Pending { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Pending<T> {
    /// Puts `value` into a free place and returns the place's number.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(place) = self.free.pop() {
            self.places[place as usize] = Some(value);
            return place;
        }
        let place = u32::try_from(self.places.len()).expect("fewer than 2^32 bios are in flight");
        self.places.push(Some(value));
        place
    }

    /// The value in `place`. Panics if there is none: a completion came twice.
    pub fn value(&mut self, place: u32) -> &mut T {
        self.places
            .get_mut(place as usize)
            .and_then(Option::as_mut)
            .expect("each I/O completes exactly once")
    }

    /// The value in `place`, if there is one.
    pub fn get(&self, place: u32) -> Option<&T> {
        self.places.get(place as usize)?.as_ref()
    }

    /// Takes out the value in `place`. Panics if there is none: a completion came twice.
    pub fn remove(&mut self, place: u32) -> T {
        let value = self
            .places
            .get_mut(place as usize)
            .and_then(Option::take)
            .expect("each I/O completes exactly once");
        self.free.push(place);
        value
    }

    /// The values inside, in no order.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.places.iter().flatten()
    }

    /// The same, to change.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten()
    }

    /// Values inside.
    pub fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again() {
        let mut pending = Pending::default();
        let a = pending.insert("a");
        let b = pending.insert("b");
        assert_eq!(pending.remove(a), "a");
        assert_eq!(pending.insert("c"), a);
        assert_eq!((*pending.value(b), pending.count()), ("b", 2));
    }

    #[test]
    #[should_panic(expected = "exactly once")]
    fn a_second_completion_is_our_bug() {
        let mut pending = Pending::default();
        let place = pending.insert(1);
        pending.remove(place);
        pending.remove(place);
    }
}
