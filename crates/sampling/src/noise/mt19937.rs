//! The Mersenne Twister MT19937 (Matsumoto and Nishimura, ACM TOMACS 8 (1998), with the seeding of 2002).

const STATE_LEN: usize = 624;
const SHIFT: usize = 397;
const UPPER_BIT: u32 = 0x8000_0000;

/// A generator of 32-bit words.
pub(super) struct Mt19937 {
    state: [u32; STATE_LEN],
    /// Words of `state` that have been handed out.
    used: usize,
}

impl Mt19937 {
    /// The generator of a 32-bit seed.
    pub(super) fn new(seed: u32) -> Self {
        let mut state = [seed; STATE_LEN];
        for i in 1..STATE_LEN {
            let previous = state[i - 1];
            state[i] = (previous ^ (previous >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { state, used: STATE_LEN }
    }

    /// The next word.
    pub(super) fn next_u32(&mut self) -> u32 {
        if self.used == STATE_LEN {
            self.refill();
        }
        let mut word = self.state[self.used];
        self.used += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn refill(&mut self) {
        for i in 0..STATE_LEN {
            let joined = (self.state[i] & UPPER_BIT) | (self.state[(i + 1) % STATE_LEN] & !UPPER_BIT);
            let twist = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + SHIFT) % STATE_LEN] ^ (joined >> 1) ^ twist;
        }
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C++ standard demands this of `std::mt19937` ([rand.predef]): seed 5489, the 10000th word.
    #[test]
    fn gives_the_word_that_the_standard_demands() {
        let mut generator = Mt19937::new(5489);
        let first: Vec<_> = (0..3).map(|_| generator.next_u32()).collect();
        assert_eq!(first, [3_499_211_612, 581_869_302, 3_890_346_734]);
        assert_eq!((3..10_000).map(|_| generator.next_u32()).last(), Some(4_123_659_995));
    }
}
